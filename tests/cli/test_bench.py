"""Tests `parallelformers-ng bench` on a model of a few kilobytes. The tests check the output's form, not the speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from parallelformers_ng.cli import bench
from parallelformers_ng.cli import commands as cli
from parallelformers_ng.errors import ParallelError

TINY = LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_READ_BYTES", 1 << 20)


def test_measures_both_and_says_all_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(TINY).save_pretrained(tmp_path)
    command = ["bench", str(tmp_path), "--device", "cpu", "--prompt", "20", "--tokens", "4", "--rounds", "2", "--json"]
    assert cli.main(command) == 0
    results = json.loads(capsys.readouterr().out)
    assert not results["random_weights"]
    assert results["ranks"] == 2
    for task in ("prefill", "decode"):
        assert {name: len(values) for name, values in results[task].items()} == {"2 ranks": 2, "one process": 2}
        assert all(value > 0 for values in results[task].values() for value in values)
    model = LlamaForCausalLM(TINY)
    assert results["weight_bytes"] == sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    share = results["median"]["decode"]["2 ranks"] * results["weight_bytes"] / results["bandwidth"]
    assert results["bandwidth_share"]["2 ranks"] == pytest.approx(share)


def test_ranks_in_few_bits_read_fewer_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LlamaForCausalLM(TINY).save_pretrained(tmp_path)
    command = ["bench", str(tmp_path), "--device", "cpu", "--prompt", "8", "--tokens", "2", "--rounds", "1", "--json"]
    assert cli.main([*command, "--quantize", "int8"]) == 0
    results = json.loads(capsys.readouterr().out)
    matrices = [p for name, p in LlamaForCausalLM(TINY).named_parameters() if "_proj" in name]
    less = sum(p.nbytes - p.numel() - 4 * len(p) for p in matrices)
    assert results["scheme"] == "int8"
    assert results["held_bytes"] == results["weight_bytes"] - less
    share = results["median"]["decode"]["2 ranks"] * results["held_bytes"] / results["bandwidth"]
    assert results["bandwidth_share"]["2 ranks"] == pytest.approx(share)


def test_configuration_alone_gets_random_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TINY.save_pretrained(tmp_path)
    config = str(tmp_path / "config.json")
    command = ["bench", config, "--device", "cpu", "--prompt", "8", "--tokens", "2", "--rounds", "1", "--no-baseline"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "random weights" in text
    assert "one process" not in text
    assert "of the bandwidth" in text
    assert cli.main([*command, "--prompt", "65"]) == 2
    assert "64 positions" in capsys.readouterr().err


def test_a_model_without_decode_is_refused() -> None:
    with pytest.raises(ParallelError, match="ViTModel does not generate"):
        bench.bench("vit")


def test_missing_devices_are_named_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["bench", "gpt2", "--device", "cuda", "--num-gpus", "3"]) == 2
    assert "num_gpus is 3, but only 0 CUDA devices are visible" in capsys.readouterr().err


@pytest.mark.parametrize(("durations", "speed"), [([0.2, 0.1, 0.3], 50.0), ([0.5], 20.0)], ids=["short", "long"])
def test_short_prompts_are_repeated(monkeypatch: pytest.MonkeyPatch, durations: list[float], speed: float) -> None:
    calls = iter(durations)
    monkeypatch.setattr(bench, "_seconds", lambda model, prompt, tokens: next(calls))
    assert bench._prefill(None, 10) == pytest.approx(speed)
    assert next(calls, None) is None
