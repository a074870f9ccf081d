"""Tests the plan: its arithmetic, its bytes, and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import parallelformers_ng
from parallelformers_ng import Column, Heads, Policy, Row, parallelize, plan
from parallelformers_ng.errors import (
    AlreadyParallelizedError,
    ParallelError,
    PlacementError,
    PolicyError,
    UnsupportedModelError,
)
from parallelformers_ng.options import WorkerOptions
from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.partition import cut_width, share_heads, spread, spread_aligned
from parallelformers_ng.sharding.rules import Rule, moved
from parallelformers_ng.sharding.tensor_plan import Shard
from tests.zoo.decoders import decoder, gpt2


def test_every_rule_is_public_and_explained() -> None:
    rules = {cls.__name__ for cls in Rule.__subclasses__() if cls.__module__ == Rule.__module__}
    explained = (Path(__file__).resolve().parents[2] / "POLICY.md").read_text()
    assert rules <= set(parallelformers_ng.__all__)
    assert not {name for name in rules if f"`{name}(" not in explained}


def test_a_plan_is_moved_by_whole_names() -> None:
    plan = {"attn": Heads("h"), "attn.self.q": Column(), "attn.o": Row(heads="attn"), "attn_norm": Column()}
    other = {"x": Heads("h"), "x.self.q": Column(), "x.o": Row(heads="x"), "attn_norm": Column()}
    assert moved(plan, "attn", "x") == other
    here = {"": Heads("h"), "self.q": Column(), "o": Row(heads=""), "attn_norm": Column()}
    assert moved(plan, "attn", "") == here


def test_braces_in_a_path_stand_for_several_paths() -> None:
    class Braced(Policy):
        plan = {"attn.{q,k}_proj": Column(), "mlp.{a,b}.{c,d}": Row(), "attn.k_proj": Column("key")}

    column, row = Column(), Row()
    expected = {"attn.q_proj": column, "attn.k_proj": Column("key"), **dict.fromkeys(("mlp.a.c", "mlp.a.d"), row)}
    assert Braced.plan == {**expected, "mlp.b.c": row, "mlp.b.d": row}


def test_spread() -> None:
    assert [stop - start for start, stop in spread(12, 5)] == [3, 3, 2, 2, 2]
    assert spread(2, 3) == [(0, 1), (1, 2), (2, 2)]
    assert [stop - start for start, stop in spread_aligned(80, 3)] == [32, 24, 24]
    assert spread_aligned(7, 2) == [(0, 4), (4, 7)]


@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize(("query", "key"), [(6, 3), (8, 2), (12, 12), (4, 1), (9, 3), (1, 1)])
def test_query_heads_are_with_their_key_heads(query: int, key: int, world_size: int) -> None:
    shares = share_heads(query, key, world_size)
    assert [head for share in shares if not share.idle for head in share.query] == list(range(query))
    for share in shares:
        readers = [share.key[place // share.groups] for place in range(len(share.query))]
        assert readers == [head // (query // key) for head in share.query]
        assert len(share.key) * share.groups == len(share.query)


def test_least_unbalanced_cut_is_chosen() -> None:
    def sizes(query: int, key: int) -> list[tuple[int, int, int]]:
        return [(len(share.query), len(share.key), share.groups) for share in share_heads(query, key, 2)]

    assert sizes(9, 3) == [(6, 2, 3), (3, 1, 3)]
    assert sizes(6, 3) == [(3, 3, 1), (3, 3, 1)]


def test_fused_parts_are_cut_part_by_part() -> None:
    heads = share_heads(4, 2, 2)
    assert cut_width(16, ["query", "key", "key"], heads, 2) == [
        ((0, 4), (8, 10), (12, 14)),
        ((4, 8), (10, 12), (14, 16)),
    ]
    assert cut_width(10, ["column", "column"], [], 2) == [((0, 3), (5, 8)), ((3, 5), (8, 10))]
    with pytest.raises(PolicyError, match="a layer has width 17, which is not a multiple of 8"):
        cut_width(17, ["query", "key", "key"], heads, 2)


@pytest.mark.parametrize("ranges", [((0, 2), (5, 7)), ((3, 7),), ((1, 2), (1, 2)), ()])
def test_a_shard_has_its_ranges_side_by_side(ranges) -> None:
    whole = torch.randn(3, 7)
    part = Shard(1, ranges).of(whole)
    assert part.shape == Shard(1, ranges).shape((3, 7))
    assert torch.equal(part, whole[:, [column for start, stop in ranges for column in range(start, stop)]])


def test_bytes() -> None:
    model = decoder("Llama", heads=8, key_heads=2, tied=True)
    shard_plan = plan(model, num_gpus=2)
    whole = sum(tensor.nbytes for tensor in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
    assert shard_plan.bytes_whole == whole
    assert max(shard_plan.bytes_per_rank) <= 0.55 * whole + sum(shard_plan.replicated.values())
    assert plan(model, num_gpus=2, fp16=True).bytes_per_rank[0] < 0.52 * shard_plan.bytes_per_rank[0]
    assert sum(shard_plan.bytes_per_rank) == whole + sum(shard_plan.replicated.values()), (
        "only replicated tensors count twice"
    )
    assert "model.norm.weight" in shard_plan.replicated
    assert shard_plan.policy == "LlamaPolicy"
    assert shard_plan.source == "written"
    assert "self_attn.q_proj" in str(shard_plan)


def test_a_model_on_meta_is_enough() -> None:
    config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    shard_plan = plan(model, num_gpus=4, dtype="bfloat16")
    assert shard_plan.bytes_whole == pytest.approx(13.5e9, rel=0.01)
    assert max(shard_plan.bytes_per_rank) <= shard_plan.bytes_whole * (1 / 4 + 0.05)


class Misspelt(Policy):
    block = "LlamaDecoderLayer"
    plan = {**LlamaPolicy.plan, "mlp.gate_prog": Column()}


class NotThere(Policy):
    block = "GPT2Block"
    plan = {"mlp.c_fc": Column()}


class WrongKind(Policy):
    block = "LlamaDecoderLayer"
    plan = {"input_layernorm": Row()}


class WrongAttribute(Policy):
    block = "LlamaDecoderLayer"
    plan = {"self_attn": Heads("num_head"), "self_attn.q_proj": Column()}


class WithoutHeads(Policy):
    block = "LlamaDecoderLayer"
    plan = {"self_attn.q_proj": Column("query")}


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            Misspelt,
            r"Misspelt: rule 'mlp.gate_prog' matches no layer of LlamaDecoderLayer \(did you mean 'mlp.gate_proj'",
        ),
        (NotThere, r"NotThere: block 'GPT2Block' is not in LlamaForCausalLM \(its blocks: LlamaDecoderLayer\)"),
        (WrongKind, r"rule 'input_layernorm' on model.layers.0.input_layernorm: a LlamaRMSNorm cannot be cut by rows"),
        (WrongAttribute, r"LlamaAttention has no attribute 'num_head'"),
        (WithoutHeads, r"is counted in heads, but no rule above it is Heads"),
        (int, r"takes Policy classes, alone or in a list"),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_policies_that_do_not_fit(policy, message: str, listed: bool) -> None:
    model = decoder("Llama")
    with pytest.raises(PolicyError, match=message):
        plan(model, custom_policies=[policy] if listed else policy)
    with pytest.raises(PolicyError, match=message):
        parallelize(model, 2, custom_policies=[policy] if listed else policy, workers={"device": "cpu"})
    assert next(model.parameters()).device.type == "cpu", "the model is unharmed"


def test_a_custom_policy_comes_first() -> None:
    class OnlyTheMlp(Policy):
        block = "GPT2Block"
        plan = {"mlp.c_fc": Column(), "mlp.c_proj": Row()}

    shard_plan = plan(gpt2(), custom_policies=OnlyTheMlp)
    assert shard_plan.source == "custom"
    assert "OnlyTheMlp" in shard_plan.tensors["transformer.h.0.mlp.c_fc.weight"].rule
    assert shard_plan.tensors["transformer.h.0.attn.c_attn.weight"].rule == "leftover"


class Foreign(nn.Module):
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_gpus": 0}, PlacementError, "num_gpus is 0"),
        ({"num_gpus": 2.5}, PlacementError, "num_gpus is 2.5"),
        ({"num_gpus": True}, PlacementError, "num_gpus is True"),
        ({"num_gpus": 300}, PlacementError, "has 300 ranks on this machine, and the limit is 256; lower num_gpus"),
        ({"workers": {"device": "tpu"}}, PlacementError, "'auto', 'cpu' or 'cuda'"),
        ({"workers": {"device": "cpu", "device_ids": [0, 1]}}, PlacementError, "device_ids"),
        ({"num_gpus": 64, "workers": {"device": "cuda"}}, PlacementError, "CUDA devices are visible"),
        ({"fp16": True, "dtype": torch.bfloat16}, ParallelError, "contradict"),
        ({"dtype": "int8"}, ParallelError, "dtype is 'int8'"),
        ({"dtype": torch.int8}, ParallelError, "floating-point"),
        ({"verbose": "loud"}, ParallelError, "verbose is 'loud'"),
        ({"seed": 1 << 64}, ParallelError, "seed is 18446744073709551616; it takes an integer of 64 bits"),
        ({"seed": -(1 << 63) - 1}, ParallelError, "seed is -9223372036854775809"),
        ({"seed": "3"}, ParallelError, "seed is '3'"),
        ({"workers": {"device": "cpu", "backend": "mpi"}}, ParallelError, "backend is 'mpi'"),
        ({"workers": {"timeout": 0}}, ParallelError, "timeout is 0"),
        ({"workers": {"timeot": 3}}, ParallelError, "workers has no option 'timeot' .did you mean 'timeout'"),
        ({"workers": {"timeout": "long"}}, ParallelError, "workers: timeout is 'long'; it takes int | float"),
        ({"workers": {"restart": 1}}, ParallelError, "workers: restart is 1; it takes True or False"),
        ({"workers": {"replicas": True}}, ParallelError, "workers: replicas is True; it takes int"),
        ({"workers": {"device_ids": [0, "1"]}}, ParallelError, r"device_ids is \[0, '1'\]; it takes list"),
        ({"fit": {"max_memory": {0: 1.5}}}, ParallelError, r"fit: max_memory is \{0: 1.5\}; it takes dict"),
        ({"workers": WorkerOptions(device="cpu", max_restarts=0.5)}, ParallelError, "max_restarts is 0.5"),
        ({"workers": 3}, ParallelError, "workers is 3; it takes WorkerOptions"),
        ({"workers": {"max_restarts": -1}}, ParallelError, "max_restarts is -1"),
        ({"decode": "fast"}, ParallelError, "decode is 'fast'"),
        ({"device": "cpu"}, ParallelError, "takes no device: pass workers={'device': …}"),
        ({"group": None}, ParallelError, "takes no group: pass workers=group"),
        ({"compile": True}, ParallelError, "takes no compile: pass decode='compile'"),
        ({"master_port": 29500}, ParallelError, "takes no master_port: the ranks connect through files"),
        ({"daemon": True}, ParallelError, "takes no daemon"),
        ({"device_map": "auto"}, ParallelError, "takes no device_map: parallelize divides the model"),
        ({"revision": "main"}, ParallelError, "revision='main' is for loading, and the model is loaded already"),
        ({"num_labels": 3}, ParallelError, "no argument 'num_labels'"),
        ({"verbos": "simple"}, ParallelError, "no argument 'verbos' .did you mean 'verbose'"),
        ({"model_class": PreTrainedModel}, ParallelError, "model_class is for loading a path"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments, error, message: str) -> None:
    model = decoder("Llama")
    with pytest.raises(error, match=message):
        parallelize(model, **{"num_gpus": 2, "workers": {"device": "cpu"}, **arguments})
    assert next(model.parameters()).device.type == "cpu"


def test_other_models_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"takes a transformers PreTrainedModel, not .*Foreign"):
        parallelize(Foreign(), 2, workers={"device": "cpu"})


def test_parallelizing_twice(groups) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)) as model:
        with pytest.raises(AlreadyParallelizedError, match=r"deparallelize\(\) first"):
            parallelize(model, 2, workers={"device": "cpu"})
        assert model(input_ids=torch.tensor([[5]])).logits.shape == (1, 1, 131)


def test_a_group_serves_one_model_at_a_time(groups) -> None:
    group = groups(2)
    with parallelize(decoder("Llama"), workers=group), pytest.raises(PlacementError, match="serves another model"):
        parallelize(gpt2(), workers=group)


def test_fp16_keeps_fp32_buffers(groups) -> None:
    model = parallelize(decoder("Llama"), workers=groups(2), fp16=True)
    assert model.dtype == torch.float16
    assert model(input_ids=torch.tensor([[5, 6]])).logits.dtype == torch.float16
    model.deparallelize()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32, "the same as after from_pretrained(dtype=float16)"
