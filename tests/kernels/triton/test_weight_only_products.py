"""Products with quantized weights in Triton's interpreter, against their twins in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallelformers_ng.kernels.triton.byte_product import (
    MAX_ROWS,
    byte_product,
    byte_product_launches,
    splits_of,
)
from parallelformers_ng.kernels.triton.nibble_product import nibble_product
from parallelformers_ng.kernels.triton.partial_results import summed
from parallelformers_ng.sharding.encoding import Encoding
from tests.kernels.triton.agreement import SIXTEEN_BITS, assert_agrees, randn
from tests.kernels.triton.interpreter import interpret
from tests.kernels.triton.twins import byte_product_twin, nibble_product_twin

interpret()

OUTPUTS = ([40], [33, 1, 70], [32, 32])


def quantized(kind: str, outputs: list[int], inputs: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return small numbers and scales of random weights."""
    encoding = Encoding(kind, -1, 32 if kind == "int4" else inputs)
    pairs = [encoding.encode(randn(each, inputs, dtype=dtype)) for each in outputs]
    return [numbers for numbers, _ in pairs], [scales for _, scales in pairs]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("rows", "inputs"), [(1, 512), (3, 131), (MAX_ROWS, 300)])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_products_of_bytes(
    dtype: torch.dtype, rows: int, inputs: int, kind: str, outputs: list[int], bias: bool
) -> None:
    x = randn(rows, inputs, dtype=dtype)
    biases = [randn(each, dtype=dtype, seed=7) for each in outputs] if bias else []
    arguments = (x, *quantized(kind, outputs, inputs, dtype), biases)
    assert_agrees(summed(byte_product(*arguments), dtype), byte_product_twin, *arguments)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("rows", "inputs", "splits"), [(1, 768, 1), (1, 1024, 2), (3, 1700, 3), (MAX_ROWS, 2310, 5)])
def test_products_of_bytes_in_splits(
    rows: int, inputs: int, splits: int, kind: str, outputs: list[int], bias: bool
) -> None:
    x = randn(rows, inputs, dtype=torch.bfloat16)
    biases = [randn(each, dtype=torch.bfloat16, seed=7) for each in outputs] if bias else []
    arguments = (x, *quantized(kind, outputs, inputs, torch.bfloat16), biases)
    (launch,), _ = byte_product_launches(*arguments)
    assert launch.grid[1] == splits
    output = byte_product(*arguments)
    assert output.shape == (splits, rows, sum(outputs))
    assert_agrees(summed(output, torch.bfloat16), byte_product_twin, *arguments)
    assert torch.equal(output, byte_product(*arguments))


def test_splits_do_not_depend_on_rows() -> None:
    arguments = (*quantized("int8", [40], 1700, torch.bfloat16), [])
    grids = {
        byte_product_launches(x, *arguments)[0][0].grid
        for rows in range(1, MAX_ROWS + 1)
        for x in [randn(rows, 1700, dtype=torch.bfloat16)]
    }
    assert grids == {(2, 3)}


@pytest.mark.parametrize(
    ("tiles", "inputs", "splits"),
    [(448, 4096, 1), (128, 4096, 4), (128, 14336, 4), (192, 4096, 2), (28, 4864, 9), (4, 65536, 16), (1, 1, 1)],
)
def test_number_of_splits(tiles: int, inputs: int, splits: int) -> None:
    assert splits_of(tiles, inputs) == splits


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("outputs", OUTPUTS, ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 512), (3, 96), (MAX_ROWS, 288)])
@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_products_of_nibbles(dtype: torch.dtype, rows: int, inputs: int, outputs: list[int], bias: bool) -> None:
    x = randn(rows, inputs, dtype=dtype)
    biases = [randn(each, dtype=dtype, seed=7) for each in outputs] if bias else []
    arguments = (x, *quantized("int4", outputs, inputs, dtype), biases)
    assert_agrees(summed(nibble_product(*arguments), dtype), nibble_product_twin, *arguments)


def test_every_number_of_fp8() -> None:
    """Subnormal numbers and both zeros are among them, NaN is not."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    numbers = numbers[~numbers.float().isnan().flatten()]
    scales = torch.ones(len(numbers), 1)
    product = byte_product(torch.ones(1, 1, dtype=torch.bfloat16), [numbers], [scales], [])
    assert torch.equal(product.float().flatten(), numbers.float().flatten())


def test_every_number_of_int4_and_int8() -> None:
    numbers, one = torch.arange(-128, 128).to(torch.int8)[:, None], torch.ones(1, 1, dtype=torch.bfloat16)
    assert torch.equal(byte_product(one, [numbers], [torch.ones(256, 1)], []).flatten(), torch.arange(-128.0, 128))
    pairs, ones = torch.arange(256, dtype=torch.uint8).view(16, 16), torch.ones(16, 1, dtype=torch.bfloat16)
    for place in range(32):
        x = torch.zeros(1, 32, dtype=torch.bfloat16)
        x[0, place] = 1
        assert torch.equal(nibble_product(x, [pairs], [ones], [])[0], nibble_product_twin(x, [pairs], [ones], []))


def test_inputs_of_one_row_do_not_reach_another() -> None:
    x = randn(3, 64, dtype=torch.bfloat16)
    for kind, function in (("int8", byte_product), ("fp8", byte_product), ("int4", nibble_product)):
        arguments = (*quantized(kind, [40], 64, torch.bfloat16), [])
        usual = function(x, *arguments)
        for poison in (float("nan"), float("inf")):
            spoiled = x.clone()
            spoiled[1] = poison
            assert torch.equal(function(spoiled, *arguments)[:, ::2], usual[:, ::2])
