"""Tests `quantize=`: quantized weights on the ranks, in saved files, and after `deparallelize`."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import quantized_memory
from parallelformers_ng import ParallelError, QuantizeOptions, api, parallelize, plan, save_sharded
from parallelformers_ng.checkpoint import encoded, nodes
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.nodes import FetchedLeaf
from parallelformers_ng.checkpoint.reading import read_shard
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.model.saving import shard
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.tensor_plan import Shard, TensorPlan
from tests.helpers.apart import find_packages
from tests.helpers.patience import await_incarnation, kill
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs
from tests.zoo.decoders import decoder
from tests.zoo.families import ALL

GREEDY = {"max_new_tokens": 6, "do_sample": False}


def llama(**options: Any) -> Any:
    return decoder("Llama", **options)


def rounded(model: Any, names: Any, scheme: str = "int8", group: int | None = None) -> Any:
    """Return a copy of the model with weights quantized and dequantized again; test_quantize_parity compares such
    weights with torchao."""
    other = copy.deepcopy(model)
    for name in names:
        weight = other.get_parameter(name)
        encoding = Encoding(scheme, -1, group or weight.shape[-1])
        weight.data = encoding.decode(*encoding.encode(weight.detach()), weight.dtype)
    return other


def linears(model: nn.Module) -> list[str]:
    return [f"{path}.weight" for path, layer in model.named_modules() if type(layer) is nn.Linear and path != "lm_head"]


@pytest.mark.parametrize(("scheme", "group", "share"), [("int8", None, 0.6), ("int4", 2, 0.8), ("fp8", None, 0.6)])
def test_loaded_model_is_quantized_and_returned(scheme: str, group: int | None, share: float, groups) -> None:
    model = llama()
    expected = rounded(model, linears(model), scheme, group)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    inputs = text_inputs()
    parallelize(model, workers=groups(2), quantize={"scheme": scheme, "group": group})

    assert largest_difference(model(**inputs).logits, expected(**inputs).logits) <= 1e-4
    assert torch.equal(model.generate(**inputs, **GREEDY), expected.generate(**inputs, **GREEDY))
    assert list(model.memory_allocated().values()) == model.shard_plan.bytes_per_rank
    assert model.shard_plan.bytes_whole < share * whole
    weight = model.model.layers[1].mlp.down_proj.weight
    assert weight.dtype is torch.float32
    torch.testing.assert_close(weight.detach() + 0, expected.model.layers[1].mlp.down_proj.weight)

    model.deparallelize()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])


def test_checkpoint_is_quantized_while_read_and_restored(tmp_path: Path, groups) -> None:
    original = llama()
    original.save_pretrained(tmp_path)
    model = parallelize(tmp_path, workers=groups(3), quantize={"scheme": "int8", "embeddings": True})
    assert "lm_head.weight" in model.shard_plan.quantized
    expected = rounded(original, model.shard_plan.quantized)
    assert largest_difference(model(**text_inputs()).logits, expected(**text_inputs()).logits) <= 1e-4
    model.deparallelize()
    assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("scheme", "group"), [("int8", None), ("int4", 2), ("fp8", None)])
def test_saved_shards_load_with_equal_numbers(scheme: str, group: int | None, tmp_path: Path, groups) -> None:
    model = llama()
    parallelize(model, workers=groups(2), quantize={"scheme": scheme, "group": group})
    want = model(**text_inputs()).logits
    save_sharded(model, tmp_path / "sharded")
    shard_plan = model.shard_plan
    model.deparallelize()

    model = parallelize(tmp_path / "sharded", workers=groups(2))
    assert model.shard_plan.quantized == shard_plan.quantized
    assert model.shard_plan.bytes_per_rank == shard_plan.bytes_per_rank
    assert torch.equal(model(**text_inputs()).logits, want)
    model.deparallelize()
    model = parallelize(tmp_path / "sharded", workers=groups(3))
    assert largest_difference(model(**text_inputs()).logits, want) <= 1e-5
    model.save_pretrained(tmp_path / "plain")
    model.deparallelize()
    plain = type(model).from_pretrained(tmp_path / "plain")
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ParallelError, match=f"{scheme} already; leave quantize out"):
        parallelize(tmp_path / "sharded", workers=groups(2), quantize="int8")
    shard(os.fspath(tmp_path / "sharded"), tmp_path / "anew", 3)  # no workers; the integers stay
    model = parallelize(tmp_path / "anew", workers=groups(3))
    assert largest_difference(model(**text_inputs()).logits, want) <= 1e-5
    model.deparallelize()


@pytest.mark.parametrize(
    ("loaded", "quantize"), [(True, "fp8"), (False, {"scheme": "int4", "group": 2})], ids=["loaded", "path"]
)
def test_a_restart_gives_the_same_numbers(loaded: bool, quantize: Any, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    model = parallelize(model if loaded else tmp_path, 2, quantize=quantize, workers={"device": "cpu"})
    want = model(**text_inputs()).logits
    kill(deployment_of(model).pids[1])
    await_incarnation(model, 1)
    assert torch.equal(model(**text_inputs()).logits, want)
    model.deparallelize()


def test_tied_embeddings_stay_or_are_quantized_once(groups) -> None:
    model = next(case for case in ALL if case.name == "llama-tied-biased").make()
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & plan(model, 2, quantize="int8").quantized.keys()
    expected = rounded(model, [*linears(model), "lm_head.weight"])
    expected.tie_weights()
    parallelize(model, workers=groups(2), quantize=QuantizeOptions("int8", embeddings=True))
    stored = [tensor.name for tensor in model.shard_plan.as_stored.stored()]
    assert ("lm_head.weight" in stored) != ("model.embed_tokens.weight" in stored)
    assert largest_difference(model(**text_inputs()).logits, expected(**text_inputs()).logits) <= 1e-4
    model.deparallelize()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_look_ups_decode_no_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    table = model.model.embed_tokens.weight
    recorded: list[int] = []
    usual = Encoding._decoded

    def decoded(self: Encoding, numbers: torch.Tensor, *args: Any) -> torch.Tensor:
        recorded.append(numbers.shape[-2])
        return usual(self, numbers, *args)

    of_two = plan(model, 2, quantize={"scheme": "int8", "embeddings": True})
    for ids in ([[1]], [[1, 2]], [[1, len(table) - 1]]):
        recorded.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Encoding, "_decoded", decoded)
            run_ranks(2, lambda c, ids=ids: cut(model, of_two, c.rank, c).model.embed_tokens(torch.tensor(ids)))
        assert recorded == [len(ids[0])] * 2


def test_skipped_layers_stay_in_high_precision() -> None:
    model = llama()
    shard_plan = plan(model, 2, quantize={"scheme": "int8", "skip": ["self_attn.*", "model.layers.0.mlp"]})
    assert {name.split(".", 3)[-1] for name in shard_plan.quantized} == {
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip
    assert not any(name.startswith("model.layers.0") for name in shard_plan.quantized)
    assert "model.layers.0.mlp.down_proj.weight" in shard_plan.high_precision
    assert "in high precision: model.embed_tokens.weight" in str(shard_plan)
    assert "model.layers.*.mlp.down_proj.weight_scale" in str(shard_plan)
    assert shard_plan.as_dict()["quantized"]["model.layers.1.mlp.up_proj.weight"] == "int8"


@pytest.mark.parametrize(
    ("quantize", "message"),
    [
        ("int7", "scheme is 'int7'; it takes one of 'int8', 'int4', 'fp8'"),
        (
            {"scheme": "int8", "skip": ["self_attn.o_pro"]},
            r"skip names 'self_attn.o_pro'.*did you mean 'self_attn.o_proj'",
        ),
        ({"shceme": "int8"}, "no option 'shceme'.*did you mean 'scheme'"),
        ({"skip": ["mlp"]}, "no scheme is given; it takes one of 'int8'"),
        ({"scheme": "int4", "group": 5}, "group is 5; it takes an even number"),
        (8, "quantize is 8; it takes QuantizeOptions"),
    ],
)
def test_options_are_read_or_refused(quantize: Any, message: str) -> None:
    with pytest.raises(ParallelError, match=message):
        plan(llama(), 2, quantize=quantize)


@pytest.mark.slow
def test_ranks_use_the_memory_of_their_shards(tmp_path: Path) -> None:
    """Memory used to read and quantize is returned to the system, not kept."""
    quantized_memory.write(str(tmp_path), "270MB")
    measured = quantized_memory.measured(str(tmp_path), 2, {"scheme": "int8", "embeddings": True})
    for end, shard_bytes in zip(measured["at the end"], measured["shard"], strict=True):
        assert end <= shard_bytes + 15e6


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize(("scheme", "group"), [("int8", None), ("int8", 2), ("int4", 2), ("int4", None), ("fp8", None)])
def test_slice_of_numbers_equals_that_of_whole(
    dim: int, scheme: str, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slices are equal for every source of the weight, and for any number of values in memory at once."""
    monkeypatch.setattr(nodes, "_ELEMENTS", 40)
    stored = torch.randn(3, 20, 14, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    lazy = LazyTensor(FetchedLeaf((3, 20, 14), torch.bfloat16, lambda: stored))
    for source, weight in ((lazy, stored), (lazy.mul(3), stored * 3), (lazy.transpose(1, 2), stored.transpose(1, 2))):
        encoding = Encoding(scheme, dim, group or weight.shape[dim])
        cut = Shard(1, ((0, 4), (10, 14))) if weight.shape[1] == 14 else Shard(1, ((2, 6), (12, 20)))
        shape = tuple(weight.shape)
        numbers, scales = encoding.parts(TensorPlan("w", shape, weight.dtype, (cut,), "w"))
        want = encoding.encode(weight)
        assert [(part.shape, part.dtype) for part in (numbers, scales)] == [(tuple(p.shape), p.dtype) for p in want]
        for part, values, is_scales in ((numbers, want[0], False), (scales, want[1], True)):
            node = encoded.EncodedPart(part.shape, part.dtype, encoding, source.node, is_scales)
            read = read_shard(node, part.shards[0])
            assert torch.equal(bits(read), bits(part.shards[0].of(values)))
        leaves = [FetchedLeaf(tuple(part.shape), part.dtype, lambda part=part: part) for part in want]
        again = encoded.Decoded(shape, torch.bfloat16, encoding, (leaves[0], leaves[1]))
        for other in (cut, Shard(1, ((1, 4), (7, 12)))):  # cuts between bytes and within a byte
            assert torch.equal(read_shard(again, other), other.of(encoding.decode(*want, torch.bfloat16)))


def bits(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.contiguous().view(torch.uint8)


def test_ranks_have_whole_groups_or_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "threads_of_rank", lambda ranks: 2)  # with one thread, columns fill the waits
    model = llama()  # 74 columns, heads of 8
    shard_plan = plan(model, 3, quantize={"scheme": "int4", "group": 2})
    down = shard_plan.tensors["model.layers.0.mlp.down_proj.weight"]
    assert [shard.ranges for shard in down.shards] == [((0, 26),), ((26, 50),), ((50, 74),)]
    assert not shard_plan.misfits

    shard_plan = plan(model, 3, quantize={"scheme": "int4", "group": 4})
    assert shard_plan.misfits["model.layers.1.mlp.down_proj.weight"] == "its 74 inputs are not a multiple of 4"
    assert "model.layers.1.mlp.down_proj.weight" in shard_plan.high_precision
    assert "not quantized: model.layers.*.mlp.down_proj.weight (its 74 inputs are not a multiple" in str(shard_plan)
    shard_plan = plan(model, 2, quantize={"scheme": "int4", "group": 16})
    assert (
        "ranks cut its 48 inputs at places that are not a multiple of 16"
        in shard_plan.misfits["model.layers.0.self_attn.o_proj.weight"]
    )
    assert shard_plan.as_dict()["misfits"] == shard_plan.misfits


def test_configs_of_torchao_are_taken_or_refused() -> None:
    find_packages()
    from torchao import quantization

    shard_plan = plan(llama(), 2, quantize=quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(8)))
    assert shard_plan.quantized["model.layers.0.mlp.up_proj.weight"] == Encoding("int4", -1, 8)
    for config in (
        quantization.Int8WeightOnlyConfig(granularity=quantization.PerTensor()),
        quantization.IntxWeightOnlyConfig(torch.int3, quantization.PerGroup(8)),
        quantization.Int8DynamicActivationInt8WeightConfig(),
    ):
        with pytest.raises(ParallelError, match=f"{type(config).__name__}.*cannot compute with"):
            plan(llama(), 2, quantize=config)
