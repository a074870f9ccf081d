"""Quantized ranks against torchao's scheme in one process: integers bit for bit, outputs, greedy tokens. The ranks are
threads."""

from __future__ import annotations

import copy

import pytest
import torch

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.tensors import get_tensor
from tests.apart import find_packages
from tests.zoo.build import largest_difference
from tests.zoo.families import ALL, Case

find_packages()
from torchao import quantization  # noqa: E402
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor  # noqa: E402

FAMILIES = (
    "llama", "qwen3", "gpt2", "opt", "bloom", "falcon", "mixtral", "qwen3-moe", "gpt-oss", "bert", "vit", "t5", "bart",
    "whisper",
)  # fmt: skip
CASES = [case for case in ALL if case.name in FAMILIES]
SIZES = {"llama": (2, 3, 4), "mixtral": (2, 3, 4), "t5": (2, 3, 4)}


def torchaos(weight: torch.Tensor, dim: int) -> Int8Tensor:
    """The weight as torchao holds it; inputs last."""
    return Int8Tensor.from_hp(weight.detach().transpose(dim, -1).contiguous(), quantization.PerRow())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((33, 50), -1), ((50, 33), -2), ((3, 20, 31), -1)])
def test_integers_and_scales_are_torchaos_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...], dim: int) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    weight[0] = 0
    encoding = Encoding("int8", dim, shape[dim])
    integers, scales = encoding.encode(weight)
    want = torchaos(weight, dim)
    assert torch.equal(integers.transpose(dim, -1), want.qdata)
    assert torch.equal(scales.transpose(dim, -1), want.scale)
    assert torch.equal(encoding.decode(integers, scales, dtype).transpose(dim, -1), want.dequantize())


@pytest.mark.parametrize(
    ("case", "world_size"),
    [(case, size) for case in CASES for size in SIZES.get(case.name, (3,))],
    ids=lambda value: getattr(value, "name", value),
)
def test_families(case: Case, world_size: int) -> None:
    model, inputs = case.make(), case.inputs()
    plan = build_plan(model, world_size, select(model), quantize=QuantizeOptions("int8"))
    expected = copy.deepcopy(model)
    for name, encoding in plan.quantized.items():
        weight = get_tensor(expected, name, False)
        if type(expected.get_submodule(name.rpartition(".")[0])) is not torch.nn.Linear:
            weight.data = torchaos(weight, encoding.dim).dequantize().transpose(encoding.dim, -1)
    layers = {name.removesuffix(".weight") for name in plan.quantized}
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(expected, config, lambda layer, path: type(layer) is torch.nn.Linear and path in layers)
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        want = expected(**inputs)[0]
        tokens = expected.generate(**prompt, **options) if case.generates else torch.zeros(0)

    def run(communicator):
        share = cut(model, plan, communicator.rank, communicator)
        with torch.no_grad():
            return share(**inputs)[0], share.generate(**prompt, **options) if case.generates else torch.zeros(0)

    for got, chosen in run_ranks(world_size, run):
        assert largest_difference(got, want) <= 1e-4
        assert torch.equal(chosen, tokens)
