"""Partial results of products in Triton's interpreter: a reader gives the bits that a kernel for the sums gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallelformers_ng.kernels.triton.byte_product import byte_product
from parallelformers_ng.kernels.triton.gate_kernel import gated
from parallelformers_ng.kernels.triton.nibble_product import nibble_product
from parallelformers_ng.kernels.triton.norm_kernel import sum_and_norm
from parallelformers_ng.kernels.triton.partial_results import row_distance, sum_of_splits, summed
from parallelformers_ng.kernels.triton.rotary_kernel import rotate_and_write
from tests.kernels.triton.agreement import SIXTEEN_BITS, randn
from tests.kernels.triton.interpreter import interpret
from tests.kernels.triton.test_pointwise_kernels import rotary_arguments
from tests.kernels.triton.test_weight_only_products import quantized

interpret()

ROWS, INPUTS = 3, 1792
"""As many inputs as three splits have."""


def product(kind: str, outputs: list[int], dtype: torch.dtype, bias: bool = False) -> Tensor:
    """Return partial results of three splits for random weights."""
    biases = [randn(each, dtype=dtype, seed=7) for each in outputs] if bias else []
    operator: Any = nibble_product if kind == "int4" else byte_product
    output: Tensor = operator(randn(ROWS, INPUTS, dtype=dtype) / 8, *quantized(kind, outputs, INPUTS, dtype), biases)
    assert output.shape == (3, ROWS, sum(outputs))
    assert output.dtype is torch.float32
    return output


def whole(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of partial results as one split: what the reader of a sum kernel got."""
    return sum_of_splits(p, dtype).unsqueeze(0)


kinds_and_types = pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for kind in ("int8", "fp8", "int4") for dtype in SIXTEEN_BITS], ids=str
)


@kinds_and_types
def test_sums_have_the_order_of_splits(kind: str, dtype: torch.dtype) -> None:
    p = product(kind, [40, 33], dtype, bias=True)
    assert torch.equal(summed(p, dtype), (torch.zeros(()) + p[0] + p[1] + p[2]).to(dtype))
    assert summed(p[:1], torch.float32).data_ptr() == p.data_ptr()


def test_a_sum_of_negative_zeros_is_zero() -> None:
    assert not summed(torch.full((2, 1, 3), -0.0), torch.bfloat16).signbit().any()


@kinds_and_types
def test_norms_of_partial_results(kind: str, dtype: torch.dtype) -> None:
    p, x, w = product(kind, [70], dtype, bias=True), randn(ROWS, 1, 70, dtype=dtype), randn(70, dtype=dtype)
    ours, theirs = (sum_and_norm(x, d, w, 1e-5) for d in (p, whole(p, dtype)))
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(ours[0], x + summed(p, dtype).unsqueeze(1))


@kinds_and_types
def test_gates_of_partial_results(kind: str, dtype: torch.dtype) -> None:
    p = product(kind, [40, 40], dtype)
    ours, theirs = (gated(*each.chunk(2, -1), dtype) for each in (p, whole(p, dtype)))
    assert ours.dtype is dtype
    assert torch.equal(ours, theirs)


@kinds_and_types
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotary_positions_of_partial_results(normed: bool, kind: str, dtype: torch.dtype) -> None:
    width, heads = 24, 3
    sizes = [heads * width, width, width]
    p = product(kind, sizes, dtype, bias=True)
    results = []
    for each in (p, whole(p, dtype)):
        arguments = [*each.split(sizes, -1), *rotary_arguments(dtype, ROWS, width, heads, normed)[3:]]
        rotated = rotate_and_write(*arguments, torch.tensor([6, 0, 3]))
        results.append([rotated, *(cache.nan_to_num(7.0) for cache in arguments[-2:])])
    assert results[0][0].dtype is dtype
    assert all(map(torch.equal, *results))
    assert torch.equal(results[0][2][1, 0, 0], summed(p, dtype)[1, -width:])  # the value of row 1


def test_distances_of_splits_are_checked() -> None:
    p = torch.zeros(2, 4, 6)
    assert row_distance(p[..., 2:4]) == row_distance(p[:1, :2]) == 6
    with pytest.raises(ValueError, match="partial results of 2 rows have strides"):
        row_distance(p[:, :2])
