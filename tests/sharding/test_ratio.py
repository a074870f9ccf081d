"""Tests ranks with unequal shares of every layer, by `ratio`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng import FitOptions, parallelize, plan, save_sharded
from parallelformers_ng.autopolicy import trials
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.cli.commands import main
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.partition import share_heads, spread, spread_columns
from tests.zoo.build import largest_difference
from tests.zoo.families import ALL, Case

Groups = Callable[[int], WorkerGroup]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
SHAPES = {"gpt2", "bloom", "bert", "t5", "vit", "llama", "qwen3", "mixtral", "falcon-h1", "deepseek-v3", "whisper"}


def case_of(name: str) -> Case:
    return next(case for case in ALL if case.name == name)


def test_items_are_spread_by_shares() -> None:
    assert [stop - start for start, stop in spread(32, 4, (1 / 7, 2 / 7, 2 / 7, 2 / 7))] == [5, 9, 9, 9]
    assert spread(3, 3, (0.02, 0.02, 0.96)) == [(0, 1), (1, 2), (2, 3)]
    assert spread(1, 2, (0.1, 0.9)) == [(0, 1), (1, 1)]
    assert spread_columns(11008, 2, (0.25, 0.75)) == [(0, 2752), (2752, 11008)]
    assert spread_columns(48, 2, (0.25, 0.75)) == [(0, 12), (12, 48)], "whole cache lines would be far off"


def test_heads_keep_whole_groups_near_the_shares() -> None:
    def sizes(*shares: float) -> list[tuple[int, int]]:
        return [(len(share.query), len(share.key)) for share in share_heads(32, 8, len(shares), shares)]

    assert sizes(0.25, 0.75) == [(8, 2), (24, 6)]
    assert sizes(1 / 7, 2 / 7, 2 / 7, 2 / 7) == [(4, 1), (8, 2), (12, 3), (8, 2)]


def llama(**sizes: int) -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(num_hidden_layers=2, **sizes))


NINE = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}


@pytest.mark.parametrize(
    "make",
    [
        lambda: llama(num_key_value_heads=8),
        lambda: llama(vocab_size=49152, **NINE),
        lambda: llama(vocab_size=256, **TINY),
        lambda: tf.MixtralForCausalLM(tf.MixtralConfig(num_hidden_layers=2)),
        lambda: tf.GPT2LMHeadModel(tf.GPT2Config()),
        lambda: tf.T5ForConditionalGeneration(tf.T5Config()),
        lambda: tf.BertModel(tf.BertConfig()),
    ],
    ids=["llama", "nine-heads", "tiny", "mixtral", "gpt2", "t5", "bert"],
)
@pytest.mark.parametrize("ratio", [(1, 3), (3, 1), (2, 3)], ids=str)
def test_bytes_of_ranks_follow_the_ratio(make: Callable[[], Any], ratio: tuple[int, int]) -> None:
    with torch.device("meta"):
        model = make()
    first, second = plan(model, 2, fit=FitOptions(ratio=ratio)).bytes_per_rank
    assert first / second == pytest.approx(ratio[0] / ratio[1], rel=0.05)


@pytest.mark.parametrize("parts", [(0.25, 0.75), (0.15, 0.55, 0.3)], ids=str)
@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_rank_equals_the_whole_model(name: str, parts: tuple[float, ...]) -> None:
    case = case_of(name)
    model, inputs = case.make(), case.inputs()
    with torch.no_grad():
        want = model(**inputs)[0]
    shard_plan = build_plan(model, len(parts), select(model), parts=parts)
    assert len(set(shard_plan.bytes_per_rank)) > 1

    def run(communicator: Any) -> torch.Tensor:
        with torch.no_grad():
            return cut(model, shard_plan, communicator.rank, communicator)(**inputs)[0]

    results = run_ranks(len(parts), run)
    assert all(torch.equal(got, results[0]) for got in results)
    assert largest_difference(results[0], want) <= 1e-4


def test_unequal_workers_generate_save_and_give_back(groups: Groups, tmp_path: Path) -> None:
    case = case_of("llama")
    model, inputs = case.make(), case.inputs()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    want = model.generate(**inputs, **GREEDY)
    parallelize(model, workers=groups(2), fit={"ratio": [1, 3]})
    allocated = list(model.memory_allocated().values())
    assert torch.equal(model.generate(**inputs, **GREEDY), want)
    save_sharded(model, tmp_path / "cut")
    model.deparallelize()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert allocated == plan(model, 2, fit={"ratio": [1, 3]}).bytes_per_rank
    for ratio in (None, (1, 3)):
        again = parallelize(str(tmp_path / "cut"), workers=groups(2), fit={"ratio": ratio})
        assert torch.equal(again.generate(**inputs, **GREEDY), want)
        again.deparallelize()


def test_inferred_policies_are_proven_for_the_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    build = trials.build_plan
    monkeypatch.setattr(trials, "build_plan", lambda *args, **more: tried.append(more["parts"]) or build(*args, **more))
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tf.CwmForCausalLM(tf.CwmConfig(num_hidden_layers=2, intermediate_size=48, bos_token_id=0, **sizes))
    shard_plan = plan(model, 2, fit={"ratio": (1, 3)})
    assert "inferred" in shard_plan.source
    first, second = shard_plan.bytes_per_rank
    assert second > 2 * first
    assert (0.25, 0.75) in tried


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        ((1, 3, 1), "fit: ratio has 3 numbers, and there are 2 ranks"),
        ((1, -3), r"fit: ratio is \(1, -3\); it takes numbers, each more than 0"),
        ((0, 1), r"fit: ratio is \(0, 1\)"),
        ((1, float("inf")), "ratio is"),
        ((1, "3"), "ratio"),
        ((), "fit: ratio has 0 numbers"),
    ],
)
def test_a_wrong_ratio_is_refused_by_name(ratio: Any, words: str) -> None:
    model = case_of("llama").make()
    for refuse in (
        lambda: plan(model, 2, fit={"ratio": ratio}),
        lambda: parallelize(model, 2, workers={"device": "cpu"}, fit={"ratio": ratio}),
    ):
        with pytest.raises(ParallelError, match=words):
            refuse()


def test_unknown_fit_options_are_refused() -> None:
    model = case_of("llama").make()
    with pytest.raises(ParallelError, match="fit has no option 'ration' \\(did you mean 'ratio'\\?\\)"):
        plan(model, 2, fit={"ration": (1, 3)})


def test_a_ratio_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "gpt2", "--ratio", "1,3", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["bytes_per_rank"]
    assert second / first == pytest.approx(3, rel=0.05)
    assert main(["plan", "gpt2", "--ratio", "1,3,1"]) == 2
    assert "ratio has 3 numbers" in capsys.readouterr().err
