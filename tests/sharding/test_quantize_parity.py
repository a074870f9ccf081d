"""Compares quantized ranks with torchao in one process: integers bit for bit, outputs, greedy tokens. The ranks are
threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.options import read_quantize
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.tensors import get_tensor
from tests.helpers.apart import find_packages
from tests.zoo.build import largest_difference
from tests.zoo.families import ALL, Case

find_packages()
from torchao import quantization  # noqa: E402

FAMILIES = (
    "llama", "qwen3", "gpt2", "opt", "bloom", "falcon", "mixtral", "qwen3-moe", "gpt-oss", "bert", "vit", "t5", "bart",
    "whisper",
)  # fmt: skip
CASES = {case.name: case for case in ALL if case.name in FAMILIES}
GROUP = 2
"""Inputs per group: small, since the widths of tiny models have few factors."""
CONFIGS = {
    "int8": quantization.Int8WeightOnlyConfig(),
    "int4": quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(GROUP)),
    "fp8": quantization.Float8WeightOnlyConfig(),
}
"""torchao's own configuration of each scheme."""


def torchaos(weight: torch.Tensor, dim: int, config: Any) -> Any:
    """Return the weight in torchao's form, with the inputs as the last dimension."""
    rows = weight.detach().transpose(dim, -1)
    layer = torch.nn.Linear(rows.shape[-1], rows[..., 0].numel(), bias=False, dtype=rows.dtype)
    layer.weight.data = rows.reshape(layer.weight.shape).contiguous()
    quantization.quantize_(layer, config)
    return layer.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((33, 48), -1), ((48, 33), -2), ((3, 20, 32), -1)])
@pytest.mark.parametrize(
    "config", [*CONFIGS.values(), quantization.Int8WeightOnlyConfig(granularity=quantization.PerGroup(GROUP))]
)
def test_numbers_and_scales_are_torchaos_bit_for_bit(
    dtype: torch.dtype, shape: tuple[int, ...], dim: int, config: Any
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
    options = read_quantize(config)
    assert options is not None
    encoding = Encoding(str(options.scheme), dim, options.block or shape[dim])
    numbers, scales = encoding.encode(weight)
    want = torchaos(weight, dim, config)
    rows = scales.transpose(dim, -1).flatten(0, -2)
    assert torch.equal(rows, want.scale)
    decoded = encoding.decode(numbers, torch.ones_like(scales), torch.float32).transpose(dim, -1).flatten(0, -2)
    assert torch.equal(decoded, want.qdata.float())
    whole = encoding.decode(numbers, scales, dtype).transpose(dim, -1).flatten(0, -2)
    assert torch.equal(whole, want.dequantize())


@pytest.mark.parametrize("scheme", CONFIGS)
def test_a_row_of_zeros_is_zeros(scheme: str) -> None:
    """In torchao, the fp8 numbers of a row of zeros are not zero."""
    encoding = Encoding(scheme, -1, GROUP)
    weight = torch.zeros(2, GROUP, dtype=torch.bfloat16)
    assert torch.equal(encoding.decode(*encoding.encode(weight), torch.bfloat16), weight)


def test_families(case: Case, world_size: int, scheme: str) -> None:
    model, inputs = case.make(), case.inputs()
    config = CONFIGS[scheme]
    plan = build_plan(model, world_size, select(model), quantize=read_quantize(config))
    assert plan.quantized
    assert not plan.misfits
    expected = copy.deepcopy(model)
    for name, encoding in plan.quantized.items():
        weight = get_tensor(expected, name, False)
        if type(expected.get_submodule(name.rpartition(".")[0])) is not torch.nn.Linear:
            rows = weight.transpose(encoding.dim, -1)
            whole = torchaos(weight, encoding.dim, config).dequantize().view(rows.shape)
            weight.data = whole.transpose(encoding.dim, -1).contiguous()
    layers = {name.removesuffix(".weight") for name in plan.quantized}
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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Test every family with every scheme on 2, 3 and 4 ranks; most combinations are slow tests."""
    if metafunc.function is not test_families:
        return
    often = {
        "llama-2-int8", "llama-3-int4", "mixtral-4-int4", "gpt-oss-2-int4", "falcon-3-int4", "gpt2-3-fp8", "t5-3-fp8",
        "qwen3-moe-3-int8", "bert-2-int8",
    }  # fmt: skip
    metafunc.parametrize(
        ("case", "world_size", "scheme"),
        [
            pytest.param(CASES[name], size, scheme, id=case_id, marks=() if case_id in often else pytest.mark.slow)
            for name in FAMILIES
            for size in (2, 3, 4)
            for scheme in CONFIGS
            for case_id in [f"{name}-{size}-{scheme}"]
        ],
    )
