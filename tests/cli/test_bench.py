"""Tests `parallelformers-ng bench` on a model of a few kilobytes. The tests check the output's form, not the speed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
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
    assert cli.main([*command, "--quantize", "int7"]) == 2
    assert "it takes one of 'int8', 'int4', 'fp8'" in capsys.readouterr().err


def test_configuration_alone_gets_random_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(bench, "bench", lambda *args, **kwargs: pytest.fail("the measurement began before the message"))
    assert cli.main([*command, "--plot", str(tmp_path / "out.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_model_without_decode_is_refused() -> None:
    with pytest.raises(ParallelError, match="ViTModel does not generate"):
        bench.bench("vit")


def test_missing_devices_are_named_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert cli.main(["bench", "gpt2", "--device", "cuda", "--num-gpus", "3"]) == 2
    assert "num_gpus is 3, but only 0 CUDA devices are visible" in capsys.readouterr().err


def _report() -> bench.Report:
    report = bench.Report("llama", True, "cpu", 2, 512, 64, 10**9, 2e10)
    report.prefill = {"2 ranks": [90.0, 100.0, 110.0], "one process": [80.0, 85.0, 90.0]}
    report.decode = {"2 ranks": [17.0, 18.0, 19.0], "one process": [14.0, 15.0, 16.0]}
    return report


def test_plot_shows_values_and_legend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, *args: Any, **kwargs: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saved)
    _report().plot(str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    prefill, decode = drawn[0].axes
    assert [text.get_text() for text in prefill.texts] == ["100.0", "85.0"]
    assert [text.get_text() for text in decode.texts] == ["18.0", "15.0"]
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["limit of the bandwidth: 20.0"]
    bars = [bar.get_window_extent() for axes in (prefill, decode) for bar in axes.patches]
    assert not any(legend.get_window_extent().overlaps(bar) for bar in bars)


def test_plot_message_leaves_the_json_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bench", lambda *args, **kwargs: _report())
    out = tmp_path / "out.svg"
    assert cli.main(["bench", "llama", "--plot", str(out), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["median"]["decode"]["2 ranks"] == 18.0
    assert f"saved the plot to {out}" in said.err
    assert out.read_text().lstrip().startswith("<?xml")
