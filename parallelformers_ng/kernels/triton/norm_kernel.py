"""The sum of a residual and its norm.

    s = x + d        y = s / √(mean(s²) + ε) ⊙ w                          (RMSNorm)

s is rounded to the data type of x before its norm, as modelling code does.

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

MOST_COLUMNS = 1 << 14
"""Widest row that the registers of a program hold."""
_COLUMNS_PER_WARP = 1024


@triton.jit
def norm_kernel(
    x, d, w, s, y,
    columns, x_row, d_row, epsilon,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row of s = x + d and of y, the norm of s. `norm_launch` describes the arguments.

    `x_row` and `d_row` are distances between rows, in elements.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    states = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if d is not None:
        states += tl.load(d + row * d_row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = states.to(s.dtype.element_ty)
        tl.store(s + row * columns + column, rounded, mask=inside)
        states = rounded.to(tl.float32)
    normed = states * tl.rsqrt(tl.sum(states * states) / columns + epsilon)
    normed *= tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * columns + column, normed.to(y.dtype.element_ty), mask=inside)


def norm_launch(x: Tensor, d: Tensor | None, w: Tensor, epsilon: float, s: Tensor, y: Tensor) -> Launch:
    """Return the launch that writes s = x + d and y, the norm of s.

    Args:
        x, d: `[rows, columns]`, dense along the columns, with at most `MOST_COLUMNS` columns. If d is None, y is the
            norm of x, and s is not written.
        w: weight of the norm, `[columns]`.
        epsilon: ε of the norm.
        s, y: outputs, `[rows, columns]`, contiguous.
    """
    rows, columns = x.shape
    block = power_of_two(columns)
    arguments: dict[str, Any] = {"x": x, "d": d, "w": w, "s": s, "y": y, "columns": columns}
    arguments |= {"x_row": x.stride(0), "d_row": 0 if d is None else d.stride(0), "epsilon": epsilon}
    warps = min(8, max(1, block // _COLUMNS_PER_WARP))
    return Launch(norm_kernel, (rows,), arguments, {"BLOCK": block}, warps)


@operator("norm(Tensor x, Tensor w, float epsilon) -> Tensor")
def norm(x: Tensor, w: Tensor, epsilon: float) -> Tensor:
    """Return the norm of x, contiguous and of the shape of x.

    Args:
        x: `[rows, 1, columns]`, with at most `MOST_COLUMNS` columns.
        w: weight of the norm, `[columns]`.
        epsilon: ε of the norm.
    """
    rows, y = x.reshape(-1, x.shape[-1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    norm_launch(rows, None, w, epsilon, y, y).run()
    return y


@operator("sum_and_norm(Tensor x, Tensor d, Tensor w, float epsilon) -> (Tensor, Tensor)")
def sum_and_norm(x: Tensor, d: Tensor, w: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return s = x + d and the norm of s, contiguous and of the shape of x.

    Args:
        x, d: `[rows, 1, columns]`, with at most `MOST_COLUMNS` columns.
        w: weight of the norm, `[columns]`.
        epsilon: ε of the norm.
    """
    s, y = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    rows, added = (each.reshape(-1, x.shape[-1]) for each in (x, d))
    norm_launch(rows, added, w, epsilon, s, y).run()
    return s, y


def norm_twin(x: Tensor, d: Tensor | None, w: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return s = x + d and the norm of s, computed by plain torch. If d is None, s is x.

    Args:
        x, d: `[…, columns]`.
        w: weight of the norm, `[columns]`.
        epsilon: ε of the norm.
    """
    s = x if d is None else x + d
    wide = s if s.dtype is torch.float64 else s.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * w
    return s, normed.to(x.dtype)
