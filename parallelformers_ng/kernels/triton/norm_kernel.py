"""The sum of a residual and its norm.

    s = x + d        y = s / √(mean(s²) + ε) ⊙ w                          (RMSNorm)
                     y = (s − mean(s)) / √(var(s) + ε) ⊙ w + b            (LayerNorm).

d is partial results, see `partial_results.py`. Their sum, and then s, are rounded to the data type of x before the
norm, as modelling code does.

Launches: 1, with a program for each row, which holds the whole row in registers.
Bytes: x, d and w are read once, s and y are written once. Without d nothing is added, and s is not written.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator, power_of_two
from parallelformers_ng.kernels.triton.partial_results import load_sum, row_distance

MOST_COLUMNS = 1 << 14
"""Widest row that the registers of a program hold."""
_COLUMNS_PER_WARP = 1024


@triton.jit
def norm_kernel(
    x, d, w, b, s, y,
    columns, x_row, d_row, epsilon,
    CENTERED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of s = x + d and of y, the norm of s. `norm_launch` describes the arguments.

    `x_row` and `d_row` are distances between rows, in elements.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    states = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if d is not None:
        states += load_sum(d + row * d_row + column, tl.num_programs(0) * d_row, inside, x, SPLITS)
        rounded = states.to(s.dtype.element_ty)
        tl.store(s + row * columns + column, rounded, mask=inside)
        states = rounded.to(tl.float32)
    if CENTERED:
        states = tl.where(inside, states - tl.sum(states) / columns, 0.0)
    normed = states * tl.rsqrt(tl.sum(states * states) / columns + epsilon)
    normed *= tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    if b is not None:
        normed += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, normed.to(y.dtype.element_ty), mask=inside)


def norm_launch(
    x: Tensor, d: Tensor | None, w: Tensor, b: Tensor | None, epsilon: float, centered: bool, s: Tensor, y: Tensor
) -> Launch:
    """Return the launch that writes s = x + d and y, the norm of s.

    Args:
        x: `[rows, columns]`, dense along the columns, with at most `MOST_COLUMNS` columns.
        d: partial results, `[splits, rows, columns]`, dense along the columns. If d is None, y is the norm of x, and s
            is not written.
        w, b: weight and bias of the norm, `[columns]`; b is None for no bias.
        epsilon: ε of the norm.
        centered: True for LayerNorm, False for RMSNorm.
        s, y: outputs, `[rows, columns]`, contiguous.
    """
    rows, columns = x.shape
    block = power_of_two(columns)
    arguments: dict[str, Any] = {"x": x, "d": d, "w": w, "b": b, "s": s, "y": y, "columns": columns}
    arguments |= {"x_row": x.stride(0), "d_row": 0 if d is None else row_distance(d), "epsilon": epsilon}
    constants: dict[str, Any] = {"CENTERED": centered, "SPLITS": 0 if d is None else len(d), "BLOCK": block}
    return Launch(norm_kernel, (rows,), arguments, constants, warps=min(8, max(1, block // _COLUMNS_PER_WARP)))


@operator("norm(Tensor x, Tensor w, Tensor? b, float epsilon, bool centered) -> Tensor")
def norm(x: Tensor, w: Tensor, b: Tensor | None, epsilon: float, centered: bool) -> Tensor:
    """Return the norm of x, contiguous and of the shape of x.

    Args:
        x: `[rows, 1, columns]`, with at most `MOST_COLUMNS` columns.
        w, b: weight and bias of the norm, `[columns]`; b is None for no bias.
        epsilon: ε of the norm.
        centered: True for LayerNorm, False for RMSNorm.
    """
    rows, y = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_launch(rows, None, w, b, epsilon, centered, y, y).run()
    return y


@operator("sum_and_norm(Tensor x, Tensor d, Tensor w, Tensor? b, float epsilon, bool centered) -> (Tensor, Tensor)")
def sum_and_norm(
    x: Tensor, d: Tensor, w: Tensor, b: Tensor | None, epsilon: float, centered: bool
) -> tuple[Tensor, Tensor]:
    """Return s = x + d and the norm of s, contiguous and of the shape of x.

    Args:
        x: `[rows, 1, columns]`, with at most `MOST_COLUMNS` columns.
        d: partial results, `[splits, rows, columns]`, as for `norm_launch`.
        w, b: weight and bias of the norm, `[columns]`; b is None for no bias.
        epsilon: ε of the norm.
        centered: True for LayerNorm, False for RMSNorm.
    """
    s, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    norm_launch(x.reshape(-1, x.shape[-1]), d, w, b, epsilon, centered, s, y).run()
    return s, y
