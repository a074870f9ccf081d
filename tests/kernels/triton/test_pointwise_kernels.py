"""Norms, rotary positions and gates in Triton's interpreter, against their twins in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from parallelformers_ng.kernels.triton.gate_kernel import gated
from parallelformers_ng.kernels.triton.norm_kernel import norm, sum_and_norm
from parallelformers_ng.kernels.triton.rotary_kernel import rotate_and_write
from tests.kernels.triton.agreement import DTYPES, assert_agrees, randn, wide
from tests.kernels.triton.interpreter import interpret
from tests.kernels.triton.twins import gate_twin, norm_twin, rotary_twin

interpret()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (5, 100), (16, 33)])
def test_residual_and_norm(rows: int, columns: int, dtype: torch.dtype) -> None:
    x, d = randn(rows, 1, columns, dtype=dtype), randn(1, rows, columns, dtype=dtype)
    w = 1 + randn(columns, dtype=dtype, seed=2) / 4
    s, y = sum_and_norm(x, d, w, 1e-5)
    assert torch.equal(s, x + d.view(x.shape))
    assert_agrees(y, lambda *each: norm_twin(*each)[1], s, None, w, 1e-5)
    alone = norm(x, w, 1e-5)
    assert_agrees(alone, lambda *each: norm_twin(*each)[1], x, None, w, 1e-5)


def test_norms_of_no_rows_and_of_zeros() -> None:
    w = torch.ones(8)
    assert norm(torch.zeros(0, 1, 8), w, 1e-5).shape == (0, 1, 8)
    assert not norm(torch.zeros(2, 1, 8), w, 1e-5).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_of_views_of_one_product(dtype: torch.dtype) -> None:
    g, u = (3 * randn(1, 3, 2 * 1030, dtype=dtype)).chunk(2, -1)
    extremes = torch.tensor([[[-200.0, 200.0, 0.0, -30.0]]], dtype=dtype)
    for gate, up in ((g, u), (extremes, extremes.flip(2) / 200)):
        output = gated(gate, up, dtype)
        assert_agrees(output, lambda *each: gate_twin(*each, each[0].dtype), gate, up)


def rotary_arguments(dtype: torch.dtype, rows: int, width: int, heads: int = 3, normed: bool = False) -> list:
    """Return the arguments of `rotate_and_write` for a cache of 7 positions and one key/value head."""
    q, k, v = randn(1, rows, (heads + 2) * width, dtype=dtype).split([heads * width, width, width], -1)
    angles = randn(rows, width // 2).repeat(1, 2)
    norms = [1 + randn(width, dtype=dtype, seed=seed) / 4 if normed else None for seed in (4, 5)]
    caches = [torch.full((rows, 1, 7, width), float("nan"), dtype=dtype) for _ in range(2)]
    return [q, k, v, angles.cos().to(dtype), angles.sin().to(dtype), *norms, 1e-6, *caches]


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 24), (2, 10)])
def test_rotary_positions_are_written(rows: int, width: int, dtype: torch.dtype, normed: bool) -> None:
    """Rows have positions of their own."""
    positions = torch.tensor([6, 0, 3])[:rows]

    def run(function: object, *arguments: object) -> Tensor:
        q, k, v, cos, sin, q_norm, k_norm, epsilon, keys, values = arguments
        keys, values = (each.clone() for each in (keys, values))  # type: ignore[attr-defined]
        rotated = function(q, k, v, cos, sin, q_norm, k_norm, epsilon, keys, values, positions)  # type: ignore[operator]
        written = [each[range(rows), :, positions].flatten(1) for each in (keys, values)]
        assert keys.isnan().sum() == values.isnan().sum() == rows * 6 * width  # no other position is
        return torch.cat([rotated, *written], -1)

    arguments = rotary_arguments(dtype, rows, width, normed=normed)
    output = run(rotate_and_write, *arguments)
    assert_agrees(output, lambda *each: run(rotary_twin, *each), *arguments)


@pytest.mark.parametrize("position", [-1, 7])
def test_positions_outside_of_the_cache_write_nothing(position: int) -> None:
    arguments = rotary_arguments(torch.float32, 2, 8)
    rotate_and_write(*arguments, torch.tensor([position]))
    assert all(cache.isnan().all() for cache in arguments[-2:])


def test_one_position_and_one_angle_for_all_rows() -> None:
    arguments = rotary_arguments(torch.float32, 3, 8)
    arguments[3:5] = [each[:1] for each in arguments[3:5]]
    twins = [each.clone() if isinstance(each, Tensor) else each for each in wide(arguments)]
    rotated = rotate_and_write(*arguments, torch.tensor([2]))
    twin = rotary_twin(*twins, torch.tensor([2]))
    for ours, theirs in ((rotated, twin), *zip(arguments[-2:], twins[-2:], strict=True)):
        assert torch.allclose(ours.double(), theirs, atol=1e-6, equal_nan=True)
