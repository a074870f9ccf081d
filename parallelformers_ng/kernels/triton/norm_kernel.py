"""The sum of a residual and its RMS norm.

s = x + d        y = s / √(mean(s²) + ε) ⊙ w

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

from parallelformers_ng.kernels.triton.launch import Launch, operator
from parallelformers_ng.kernels.triton.partial_results import load_sum, row_distance

# A program holds its row in registers, which have room for this number of columns.
MAX_COLUMNS = 1 << 14
_COLUMNS_PER_WARP = 1024


@triton.jit
def norm_kernel(x, d, w, s, y, columns, x_row, d_row, epsilon, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute one row. `x_row` and `d_row` are distances between rows, in elements."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    states = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if d is not None:
        states += load_sum(d + row * d_row + column, tl.num_programs(0) * d_row, inside, x, SPLITS)
        rounded = states.to(s.dtype.element_ty)
        tl.store(s + row * columns + column, rounded, mask=inside)
        states = rounded.to(tl.float32)
    normed = states * tl.rsqrt(tl.sum(states * states) / columns + epsilon)
    normed *= tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, normed.to(y.dtype.element_ty), mask=inside)


def norm_launches(
    x: Tensor, d: Tensor | None, w: Tensor, epsilon: float
) -> tuple[tuple[Launch], tuple[Tensor, Tensor]]:
    """Return the launch that writes the sum s and its norm y, and these two outputs, contiguous and of the shape of x.

    Args:
        x: `[rows, 1, columns]`, with at most `MAX_COLUMNS` columns.
        d: partial results, `[splits, rows, columns]`, dense along the columns. If d is None, y is the norm of x, and s
            is not written.
        w: weight of the norm, `[columns]`.
    """
    columns = x.shape[-1]
    rows, block = x.reshape(-1, columns), triton.next_power_of_2(columns)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    s = y if d is None else torch.empty_like(y)
    arguments: dict[str, Any] = {"x": rows, "d": d, "w": w, "s": s, "y": y, "columns": columns, "epsilon": epsilon}
    arguments |= {"x_row": rows.stride(0), "d_row": 0 if d is None else row_distance(d)}
    constants: dict[str, Any] = {"SPLITS": 0 if d is None else len(d), "BLOCK": block}
    warps = min(8, max(1, block // _COLUMNS_PER_WARP))
    return (Launch(norm_kernel, (len(rows),), arguments, constants, warps),), (s, y)


def _norm_alone(x: Tensor, w: Tensor, epsilon: float) -> tuple[tuple[Launch], Tensor]:
    launches, (_, y) = norm_launches(x, None, w, epsilon)
    return launches, y


norm = operator("norm(Tensor x, Tensor w, float epsilon) -> Tensor", _norm_alone)
sum_and_norm = operator("sum_and_norm(Tensor x, Tensor d, Tensor w, float epsilon) -> (Tensor, Tensor)", norm_launches)
