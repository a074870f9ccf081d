"""Tests that quantized checkpoints, read by slices, give the same weights and outputs as transformers in one
process."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from parallelformers_ng import CheckpointError, ParallelError, UnsupportedModelError, parallelize, save_sharded
from parallelformers_ng.autopolicy.planning import make_plan
from parallelformers_ng.checkpoint import nodes
from parallelformers_ng.checkpoint.formats import numbers
from parallelformers_ng.checkpoint.loading import load_skeleton
from parallelformers_ng.checkpoint.nodes import FetchedLeaf
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.options import FitOptions, read_quantize
from parallelformers_ng.sharding.plan import ShardPlan
from tests.helpers.patience import await_incarnation, kill
from tests.helpers.quantized_checkpoints import EXPECTED, FORMATS, GREEDY, KIND_ON_RANKS, READ_BY_KERNELS
from tests.helpers.quantized_damage import DAMAGES, Damaged, damaged
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs

DEQUANTIZE = {"dequantize": True}
LAYER = "model.layers.1.mlp.down_proj"
State = dict[str, Tensor]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make one checkpoint of each format, in a folder of its name."""
    folder = tmp_path_factory.mktemp("quantized")
    command = [sys.executable, "-m", "tests.helpers.quantized_checkpoints", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    return folder


def expected(path: Path) -> tuple[State, State]:
    """Return the expected logits and tokens by name, and the expected weights by name."""
    outputs = load_file(path / EXPECTED)
    weights = {name.removeprefix("state."): outputs.pop(name) for name in list(outputs) if name.startswith("state.")}
    return outputs, weights


def check(model: Any, path: Path) -> None:
    outputs, _ = expected(path)
    assert largest_difference(model(**text_inputs()).logits, outputs["logits"]) <= 1e-4
    assert torch.equal(model.generate(**text_inputs(), **GREEDY), outputs["tokens"])


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_ranks_compute_the_same_as_transformers(name: str, world_size: int, checkpoints: Path, groups) -> None:
    path, allowed = checkpoints / name, None if name in KIND_ON_RANKS else DEQUANTIZE
    if world_size == 4 and name in IN_GROUPS:
        with pytest.raises(UnsupportedModelError, match=r"pass quantize={'dequantize': True}"):
            parallelize(path, workers=groups(world_size), dtype="float32")
        allowed = DEQUANTIZE
    model = parallelize(path, workers=groups(world_size), dtype="float32", quantize=allowed)
    if allowed is None:
        assert {encoding.kind for encoding in model.shard_plan.quantized.values()} == {KIND_ON_RANKS[name]}
        assert not model.shard_plan.misfits
    check(model, path)
    model.deparallelize()
    for key, tensor in expected(path)[1].items():
        torch.testing.assert_close(model.state_dict()[key], tensor, rtol=1e-6, atol=1e-7)


IN_GROUPS = ("fp8-blocks", "compressed-fp8-blocks", "torchao-int4", "gptq-symmetric", "experts-fp8-blocks")
"""Formats with groups of 32 inputs; on four ranks, heads of 16 cut the groups in half."""


def planned(path: Path, ranks: int = 2, quantize: Any = None) -> ShardPlan:
    model = load_skeleton(str(path), torch.float32, dequantize=bool(quantize))
    return make_plan(model, ranks, None, None, FitOptions(), read_quantize(quantize))


_OFTEN = ("fp8-blocks", "compressed-int8-packed", "torchao-int4", "gptq-symmetric", "awq", "mxfp4", "experts-int8")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.slow) for name in FORMATS]
)
def test_dequantize_is_needed_unless_kernels_read_the_format(name: str, checkpoints: Path) -> None:
    """Without `dequantize`, weights stay quantized, and a format that no kernel reads raises an error."""
    assert bool(planned(checkpoints / name, quantize=DEQUANTIZE).quantized) == (name in READ_BY_KERNELS)
    if name in KIND_ON_RANKS:
        assert {encoding.kind for encoding in planned(checkpoints / name).quantized.values()} == {KIND_ON_RANKS[name]}
    else:
        with pytest.raises(
            UnsupportedModelError, match=r"is quantized by .*as it is stored: it (has|is) .*'dequantize'"
        ):
            planned(checkpoints / name)
    both = planned(checkpoints / name, quantize={"scheme": "int8", "dequantize": True})
    assert {encoding.kind for encoding in both.quantized.values()} == {"int8"}


def test_format_is_refused_with_its_reason(checkpoints: Path) -> None:
    reasons = {
        "mxfp4": "it is stored as 4-bit floats",
        "bitsandbytes-nf4": "it is stored as nf4 codes",
        "awq": "it has zero points",
        "gptq-shuffled": "it has zero points",
    }
    for name, why in reasons.items():
        with pytest.raises(UnsupportedModelError, match=why):
            planned(checkpoints / name)
    with pytest.raises(UnsupportedModelError, match=r"scales are torch.float16, which torch.bfloat16 cannot represent"):
        load_skeleton(str(checkpoints / "gptq-symmetric"), torch.bfloat16)
    with pytest.raises(ParallelError, match="no scheme is given"):
        parallelize(checkpoints / "mxfp4", 2, quantize={})


def test_weights_without_fitting_scales_are_refused_or_listed(checkpoints: Path) -> None:
    path = checkpoints / "gptq-symmetric"  # groups of 32 inputs, heads of 16
    with pytest.raises(UnsupportedModelError, match=r"layers.\*.self_attn.o_proj.weight \(ranks cut"):
        planned(path, 4)
    shard_plan = planned(path, 4, DEQUANTIZE)
    assert "model.layers.1.self_attn.o_proj.weight" in shard_plan.misfits
    assert shard_plan.quantized.keys().isdisjoint(shard_plan.misfits)
    assert "not quantized: model.layers.*.self_attn.o_proj.weight (ranks cut" in str(shard_plan)


def test_weights_without_fitting_scales_allow_foreign_code(checkpoints: Path, monkeypatch) -> None:
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, x))
    shard_plan = planned(checkpoints / "gptq-symmetric", 4, DEQUANTIZE)  # groups of 32 inputs, heads of 16
    assert shard_plan.misfits
    assert not shard_plan.uncut


def test_changed_integer_weights_are_refused(checkpoints: Path) -> None:
    model = load_skeleton(str(checkpoints / "compressed-int8"))
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(layer.weight * 2, requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"layers.\*.mlp.up_proj.weight \(.* does not keep their scales"):
        make_plan(model, 2, None, None, FitOptions())
    assert (
        "model.layers.0.mlp.up_proj.weight"
        in make_plan(model, 2, None, None, FitOptions(), read_quantize(DEQUANTIZE)).misfits
    )


def test_meta_model_takes_numbers_with_their_scales(checkpoints: Path, groups) -> None:
    path = checkpoints / "fp8-blocks"
    with torch.device("meta"):
        bare = LlamaForCausalLM(AutoConfig.from_pretrained(path))
    model = parallelize(bare, workers=groups(2), weights=path)
    assert model.shard_plan.quantized
    check(model, path)
    model.deparallelize()


def test_another_format_is_refused_by_its_name(checkpoints: Path, tmp_path: Path) -> None:
    configured(checkpoints / "fp8-blocks", tmp_path / "other", lambda said: {"quant_method": "hqq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match="quantized by hqq, which is not supported; supported methods: fp8"):
        load_skeleton(str(tmp_path / "other"), dequantize=True)


@pytest.mark.parametrize("name", ["bitsandbytes-nf4", "compressed-int8"])
def test_saved_model_is_ordinary_or_sharded_checkpoint(name: str, checkpoints: Path, tmp_path: Path, groups) -> None:
    path, outputs = checkpoints / name, expected(checkpoints / name)[0]
    model = parallelize(path, workers=groups(2), dtype="float32", quantize=DEQUANTIZE)
    save_sharded(model, tmp_path / "cut")
    model.save_pretrained(tmp_path / "whole")
    model.deparallelize()
    whole = LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    assert largest_difference(whole(**text_inputs()).logits, outputs["logits"]) <= 1e-4
    with parallelize(tmp_path / "cut", workers=groups(3)) as again:
        assert bool(again.shard_plan.quantized) == (name in KIND_ON_RANKS)
        check(again, path)


def test_restarted_worker_reads_the_same_weights(checkpoints: Path) -> None:
    path = checkpoints / "bitsandbytes-nf4"
    with parallelize(path, 2, workers={"device": "cpu"}, dtype="float32", quantize=DEQUANTIZE) as model:
        kill(deployment_of(model).pids[0])
        await_incarnation(model, 1)
        check(model, path)


def test_other_formats_can_be_requantized_to_int8(checkpoints: Path, groups) -> None:
    both = {"scheme": "int8", "dequantize": True}
    path = checkpoints / "fp8-blocks"
    with parallelize(path, workers=groups(2), dtype="float32", quantize=both) as model:
        assert {encoding.kind for encoding in model.shard_plan.quantized.values()} == {"int8"}
        assert largest_difference(model(**text_inputs()).logits, expected(path)[0]["logits"]) <= 0.1


def leaf(tensor: Tensor) -> FetchedLeaf:
    return FetchedLeaf(tuple(tensor.shape), tensor.dtype, lambda: tensor)


def test_slices_equal_slices_of_the_whole_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are blocks that end beyond the weight, groups in another order, and rows that end within a byte."""
    monkeypatch.setattr(nodes, "_ELEMENTS", 40)
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (2, 20, 14), generator=draw, dtype=torch.int8)
    blocks = numbers.Scaled(values.shape, torch.float32, leaf(values), leaf(torch.rand(2, 3, 4)), (1, 8, 4))
    order = torch.tensor([0, 2, 1, 1, 0, 2, 2, 0, 1, 0, 1, 2, 0, 1])
    scales, zeros = torch.rand(20, 3), torch.randint(0, 9, (20, 3))
    groups = numbers.Scaled((20, 14), torch.float32, leaf(values[0]), leaf(scales), (1, order), leaf(zeros))
    assert torch.equal(read(groups, {}), (values[0] - zeros[:, order]) * scales[:, order])
    codes = torch.randint(0, 256, (140,), generator=draw, dtype=torch.uint8)
    table = torch.rand(16)
    unpacked = numbers.Unpacked((279,), torch.float32, leaf(codes), 4, 0, (1, 0), table)
    flat = numbers.Flat((31, 9), torch.float32, unpacked)
    assert torch.equal(read(flat, {}).flatten()[:2], table[[int(codes[0]) >> 4, int(codes[0]) & 15]])
    words = torch.randint(-(2**31), 2**31, (5, 3), generator=draw).int()
    columns = numbers.Unpacked((20, 3), torch.int8, leaf(words), 8, 0, (0, 1, 2, 3))
    for node in (blocks, groups, flat, columns):
        whole = read(node, {})
        for dim in range(whole.ndim):
            ranges = ((1, 2), (0, whole.shape[dim] - 1)) if whole.shape[dim] > 2 else ((1, 2),)
            want = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
            assert torch.equal(read(node, {dim: ranges}), want)


def configured(path: Path, to: Path, change: Callable[[Any], Any]) -> Path:
    """Copy a checkpoint and change its quantization config."""
    shutil.copytree(path, to)
    config = json.loads((to / "config.json").read_text())
    config["quantization_config"] = change(config["quantization_config"])
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return to


def test_undescribed_quantized_numbers_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    for name in ("fp8-tensors", "torchao-int8", "compressed-int8"):
        path = configured(checkpoints / name, tmp_path / name, lambda said: None)
        with pytest.raises(CheckpointError, match=r"(proj.weight as|is missing|does not contain|has shape)"):
            load_skeleton(str(path))


# -- damage --------------------------------------------------------------------------------------------------------

EACH = 12
"""Damaged copies per format in the slow test, more than 200 in all."""


def refused(broken: Damaged, error: BaseException) -> None:
    assert str(broken.path) in str(error), f"{broken.what}: {error}"
    assert broken.names in str(error), f"{broken.what}: {error} does not name {broken.names}"


def some(checkpoints: Path, folder: Path) -> Iterator[Damaged]:
    """Yield two damaged copies of one format after another."""
    for number, name in enumerate(FORMATS):
        yield from damaged(checkpoints / name, folder, range(number, number + 1))


def test_damage_is_refused_by_name(checkpoints: Path, tmp_path: Path) -> None:
    """Damaged copies raise an error that names them, before workers start."""
    seen = set()
    for broken in some(checkpoints, tmp_path):
        with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
            load_skeleton(str(broken.path), dequantize=True)
        refused(broken, caught.value)
        seen.add(broken.what.rsplit("-", 2)[1])
    assert len(seen) >= len(DAMAGES) - 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_hundred_are_refused_and_leave_nothing(checkpoints: Path, tmp_path: Path, groups) -> None:
    group, before, count = groups(2), resources(), 0
    for name in FORMATS:
        for broken in damaged(checkpoints / name, tmp_path, range(EACH)):
            with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
                parallelize(broken.path, workers=group, quantize={"dequantize": True})
            refused(broken, caught.value)
            assert not group.in_use
            count += 1
    assert count >= 200
    del caught  # the exception refers to frames that keep the file open
    assert resources() == before
    assert not list(tmp_path.iterdir())


def resources() -> tuple[int, int, list[str]]:
    """Return this process's number of descriptors, its number of children and its files of shared memory."""
    gc.collect()
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return len(os.listdir("/proc/self/fd")), len(children), sorted(os.listdir("/dev/shm"))
