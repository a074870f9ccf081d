"""Tests pipelines: each rank has some of the layers, and all ranks get every result."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from parallelformers_ng import parallelize, plan, save_sharded
from parallelformers_ng.autopolicy.planning import better
from parallelformers_ng.autopolicy.proof import UNCUT, may_merge
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.cli.commands import main
from parallelformers_ng.collectives.shared_result import FIRST_BYTES, share
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import ParallelError, PlacementError, UnsupportedModelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.options import read_quantize
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.plan import ShardPlan
from tests.helpers.patience import await_incarnation, kill
from tests.zoo.build import largest_difference
from tests.zoo.families import ALL, Case

Groups = Callable[[int], WorkerGroup]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
PIPELINE = {"strategy": "pipeline"}
BOTH = {"strategy": "tensor+pipeline", "tensor": 2}
CPU = torch.device("cpu")


def case_of(name: str) -> Case:
    return next(case for case in ALL if case.name == name)


def deep_llama(layers: int = 5, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    config = tf.LlamaConfig(vocab_size=64, num_hidden_layers=layers, pad_token_id=0, **sizes, **more)
    model = tf.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    return model


IDS = torch.tensor([[5, 9, 17, 31], [3, 4, 8, 2]])


# -- one rank computes for all -----------------------------------------------------------------------------------------


def test_result_of_any_structure_reaches_all_ranks() -> None:
    large = torch.arange(3 * FIRST_BYTES, dtype=torch.float64).view(3, -1)
    shared_value = {"a": (large, None, torch.ones(2, 0)), "b": [torch.tensor(True), 7, large.to(torch.bfloat16).T]}

    def run(communicator: Any) -> Any:
        return share(communicator, 1, (lambda: shared_value) if communicator.rank == 1 else None, CPU)

    for got in run_ranks(3, run):
        torch.testing.assert_close(got, shared_value, rtol=0, atol=0)


def test_exception_of_one_rank_ends_the_call(groups: Groups) -> None:
    """A layer before the last layer of its stage raises, while all other ranks wait for the last layer's result."""
    model = deep_llama()
    parallelize(model, workers=groups(2), fit=PIPELINE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size of tensor"):
            model(IDS, attention_mask=torch.zeros(2, 1, 3, 3))
        assert model(IDS).logits.shape == (2, 4, 64)
    model.deparallelize()


# -- equal to the whole model ----------------------------------------------------------------------------------------

SHAPES = (
    "gpt2",
    "llama",
    "bert",
    "t5",
    "t5-gated-untied",
    "vit",
    "mixtral",
    "qwen3",
    "mamba2",
    "falcon-h1",
    "qwen3-vl",
)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_every_rank_equals_the_whole_model(name: str, width: int) -> None:
    """The pipelines have two stages of one rank each, or of two ranks that shard the layers."""
    case = case_of(name)
    model, inputs = case.make(), case.inputs()
    prompt = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    with torch.no_grad():
        want = model(**inputs)[0]
        tokens = model.generate(**prompt, **GREEDY) if case.generates else None
    within = UNCUT if width == 1 else select(model, None, width)
    shard_plan = in_stages(build_plan(model, width, within), model, [0.5, 0.5], merged=name != "qwen3-vl")
    assert (shard_plan.world_size, shard_plan.stage_width) == (2 * width, width)

    def run(communicator: Any) -> Any:
        part = cut(model, shard_plan, communicator.rank, communicator)
        with torch.no_grad():
            return part(**inputs)[0], part.generate(**prompt, **GREEDY) if case.generates else None

    for got, got_tokens in run_ranks(2 * width, run):
        assert largest_difference(got, want) <= 1e-4
        assert tokens is None or torch.equal(got_tokens, tokens)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ratio", [(1, 1), (1, 1, 1), (1, 1, 1, 1), (0.5, 1, 1, 1)], ids=str)
def test_stages_of_any_number_and_ratio(ratio: tuple[float, ...], tied: bool) -> None:
    model = deep_llama(9, tie_word_embeddings=tied)
    want = model.generate(IDS, **GREEDY)
    shares = [part / sum(ratio) for part in ratio]
    shard_plan = in_stages(build_plan(model, 1, UNCUT), model, shares)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    copies = model.lm_head.weight.nbytes if tied else 0
    for rank_bytes, part in zip(shard_plan.bytes_per_rank, shares, strict=True):
        assert rank_bytes <= (shard_plan.bytes_whole + copies) * part + layer

    def run(communicator: Any) -> torch.Tensor:
        return cut(model, shard_plan, communicator.rank, communicator).generate(IDS, **GREEDY)

    assert all(torch.equal(tokens, want) for tokens in run_ranks(len(ratio), run))


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral"])
@pytest.mark.parametrize(("world_size", "fit"), [(2, PIPELINE), (3, PIPELINE), (4, BOTH)])
def test_workers_in_stages(name: str, world_size: int, fit: dict[str, Any], groups: Groups) -> None:
    case = case_of(name)
    model, inputs = case.make(), case.inputs()
    model.set_attn_implementation("eager")
    looks = {"output_attentions": True, "output_hidden_states": True}
    prompt = {key: value for key, value in inputs.items() if not key.startswith("decoder_")}
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        want = model(**inputs, **looks)
        tokens = model.generate(**prompt, **GREEDY, num_beams=3) if case.generates else None
    parallelize(model, workers=groups(world_size), fit=fit)
    got = model(**inputs, **looks)
    assert got.keys() == want.keys()
    for key in (key for key in want if "attentions" in key or "hidden_states" in key):
        assert len(got[key]) == len(want[key]) > 0
        assert all(largest_difference(mine, its) <= 1e-4 for mine, its in zip(got[key], want[key], strict=True))
    assert largest_difference(got[0], want[0]) <= 1e-4
    assert tokens is None or torch.equal(model.generate(**prompt, **GREEDY, num_beams=3), tokens)
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    model.deparallelize()
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(("world_size", "fit"), [(2, PIPELINE), (4, BOTH)])
def test_caches_batches_and_errors(world_size: int, fit: dict[str, Any], groups: Groups) -> None:
    model = deep_llama()
    alone = [model.generate(IDS[:1], max_new_tokens=count, do_sample=False) for count in range(5, 9)]
    want = model(IDS)
    then = model(input_ids=IDS[:, :1], past_key_values=want.past_key_values).logits
    parallelize(model, workers=groups(world_size), fit=fit, batching=True)
    first = model(IDS)
    assert first.past_key_values.get_seq_length() == 4
    assert largest_difference(model(input_ids=IDS[:, :1], past_key_values=first.past_key_values).logits, then) <= 1e-4
    with pytest.raises(IndexError, match="index out of range"):
        model(torch.tensor([[99]]))
    tokens: list[Any] = [None] * len(alone)

    def generate(number: int) -> None:
        tokens[number] = model.generate(IDS[:1], max_new_tokens=5 + number, do_sample=False)

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(alone))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(mine, its) for mine, its in zip(tokens, alone, strict=True))
    model.deparallelize()


def test_hooks_run_on_blocks_not_within_them(groups: Groups) -> None:
    model = deep_llama()
    with torch.no_grad():
        want = model(IDS, output_hidden_states=True).hidden_states
    notes: list[torch.Tensor] = []
    parallelize(model, workers=groups(2), fit=PIPELINE)
    hooks = [
        layer.register_forward_hook(lambda module, args, output: notes.append(output)) for layer in model.model.layers
    ]
    model(IDS)
    for hook in hooks:
        hook.remove()
    assert len(notes) == 5
    assert all(largest_difference(mine, its) <= 1e-4 for mine, its in zip(notes[:4], want[1:5], strict=True))
    with pytest.raises(ParallelError, match="refused"):
        model.model.layers[4].mlp.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ParallelError, match="is cut: called alone"):
        model.model.layers[4].mlp(torch.randn(1, 3, 32))
    model.deparallelize()


@pytest.mark.parametrize(("world_size", "fit"), [(2, PIPELINE), (4, BOTH)])
def test_dead_worker_returns_with_its_stage(world_size: int, fit: dict[str, Any], tmp_path: Path) -> None:
    model = deep_llama()
    want = model.generate(IDS, **GREEDY)
    uneven = {**fit, "ratio": (1, 2)}
    parallelize(model, world_size, workers={"device": "cpu"}, fit=uneven)
    assert list(model.memory_allocated().values()) == plan(deep_llama(), world_size, fit=uneven).bytes_per_rank
    kill(deployment_of(model).pids[1])
    await_incarnation(model, 1)
    assert torch.equal(model.generate(IDS, **GREEDY), want)
    save_sharded(model, tmp_path / "cut")
    model.save_pretrained(tmp_path / "whole")
    model.deparallelize()
    for name, options in (("cut", None), ("cut", fit), ("whole", fit)):
        with parallelize(str(tmp_path / name), world_size, workers={"device": "cpu"}, fit=options) as again:
            assert torch.equal(again.generate(IDS, **GREEDY), want)


@pytest.mark.parametrize("fit", [{"ratio": (1, 3)}, {"cache": "int8"}], ids=str)
def test_dead_worker_returns_with_its_part(fit: dict[str, Any]) -> None:
    with parallelize(deep_llama(), 2, workers={"device": "cpu"}, fit=fit) as model:
        want, parts = model.generate(IDS, **GREEDY), model.memory_allocated()
        kill(deployment_of(model).pids[1])
        await_incarnation(model, 1)
        assert model.memory_allocated() == parts
        assert torch.equal(model.generate(IDS, **GREEDY), want)


# -- other options, and refusals -------------------------------------------------------------------------------------


def test_blocks_are_merged_where_that_is_proven() -> None:
    assert may_merge(case_of("llama").make())
    assert not may_merge(case_of("qwen3-vl").make())


def test_impossible_pipelines_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="MobileBertForMaskedLM cannot be computed in stages"):
        plan(case_of("mobilebert").make(), 2, fit=PIPELINE)
    with pytest.raises(PlacementError, match="9 stages need 9 parts, but the model has only 7"):
        plan(deep_llama(), 9, fit=PIPELINE)
    for more, words in (
        ({"fit": {"strategy": "circle"}}, "strategy is 'circle'; it takes one of 'tensor', 'pipeline', 'tensor"),
        ({"fit": {"tensor": 2}}, "only strategy='tensor\\+pipeline' takes tensor=, the ranks of each stage"),
        ({"fit": {"strategy": "tensor+pipeline"}}, "tensor is None and strategy 'tensor\\+pipeline'"),
        (
            {"fit": BOTH},
            "tensor is 2, and 2 ranks make no stages of 2 ranks; num_gpus must be a multiple of 2, at least 4",
        ),
        ({"fit": {**BOTH, "tensor": 1}}, "it takes at least 2 ranks. For 1 rank, pass strategy='pipeline'"),
        ({"fit": PIPELINE, "decode": "compile"}, "decode is for strategy='tensor'"),
        ({"fit": {**PIPELINE, "cache": "int8"}}, "cache is for strategy='tensor'"),
        ({"fit": {**PIPELINE, "ratio": (1, 2, 3)}}, "ratio has 3 numbers, and there are 2 stages"),
    ):
        with pytest.raises(ParallelError, match=words):
            parallelize(deep_llama(), 2, workers={"device": "cpu"}, **more)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("name", ["t5", "mixtral"])
def test_in_few_bits(name: str, width: int) -> None:
    case, bits = case_of(name), read_quantize({"scheme": "int8", "embeddings": True})
    model, inputs = case.make(), case.inputs()
    within = UNCUT if width == 1 else select(model, None, width)
    shard_plan = in_stages(build_plan(model, width, within, quantize=bits), model, [0.5, 0.5])
    assert max(shard_plan.bytes_per_rank) < 0.75 / width * shard_plan.bytes_whole

    def run(plan: ShardPlan) -> list[torch.Tensor]:
        def on_rank(communicator: Any) -> torch.Tensor:
            with torch.no_grad():
                return cut(model, plan, communicator.rank, communicator)(**inputs)[0]

        return run_ranks(plan.world_size, on_rank)

    (want,) = run(build_plan(model, 1, UNCUT, quantize=bits))
    assert all(largest_difference(got, want) <= 1e-4 for got in run(shard_plan))


@pytest.mark.parametrize("shares", [(0.3, 0.7), (0.65, 0.35)], ids=["in the encoder", "in the decoder"])
@pytest.mark.parametrize("merged", [True, False])
def test_bias_of_heads_reaches_later_stages(shares: tuple[float, float], merged: bool) -> None:
    """T5's first layer makes a bias that all later layers add: each rank has the bias of its own heads."""
    case = case_of("t5")
    model, inputs = case.make(), case.inputs()
    shard_plan = in_stages(build_plan(model, 2, select(model, None, 2)), model, shares, merged)
    stages = {tensor.rule for name, tensor in shard_plan.tensors.items() if "coder.block" in name}
    assert stages == {"stage 0", "stage 1"}
    with torch.no_grad():
        want = model(**inputs).logits

    def run(communicator: Any) -> torch.Tensor:
        with torch.no_grad():
            return cut(model, shard_plan, communicator.rank, communicator)(**inputs).logits

    assert all(largest_difference(got, want) <= 1e-4 for got in run_ranks(4, run))


def test_auto_explains_its_choice_in_a_line() -> None:
    even = plan(deep_llama(), 2, fit={"strategy": "auto"})
    assert even.strategy == "tensor"
    assert "strategy: tensor, because 9" in str(even)
    model = deep_llama()
    whole = build_plan(model, 2, UNCUT)
    staged = in_stages(build_plan(model, 1, UNCUT), model, [0.5, 0.5])

    def refuse() -> Any:
        raise UnsupportedModelError("no policy knows it")

    assert "strategy: pipeline, because its fullest rank has" in str(better(lambda: whole, lambda: staged))
    assert "strategy: pipeline, because the layers cannot be sharded: no policy" in str(better(refuse, lambda: staged))
    assert "strategy: tensor, because the model cannot be divided into stages: no policy" in str(
        better(lambda: whole, refuse)
    )
    with pytest.raises(UnsupportedModelError):
        better(refuse, refuse)


def test_plan_command_accepts_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "examples/demo_model", "--strategy", "pipeline", "--ratio", "1,2"]) == 0
    assert "(pipeline)" in capsys.readouterr().out
    both = ["--num-gpus", "4", "--strategy", "tensor+pipeline", "--tensor", "2", "--json"]
    assert main(["plan", "examples/demo_model", *both]) == 0
    tokens = json.loads(capsys.readouterr().out)
    assert tokens["strategy"] == "tensor+pipeline"
    assert max(tokens["bytes_per_rank"]) < tokens["bytes_whole"] * 0.3


def test_the_table_says_where_each_tensor_is() -> None:
    shard_plan = plan(deep_llama(), 2, fit=PIPELINE)
    assert shard_plan.strategy == shard_plan.as_dict()["strategy"] == "pipeline"
    assert "LlamaForCausalLM on 2 ranks, policy stages (pipeline)\n" in str(shard_plan)
    line = next(line for line in str(shard_plan).splitlines() if line.startswith("lm_head.weight"))
    assert line.split() == ["lm_head.weight", "1", "[64,", "32]", "stage", "1", "–", "[64,", "32]"]
