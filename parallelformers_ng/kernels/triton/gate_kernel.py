"""The gate of a feed-forward.

y = silu(g) ⊙ u

Launches: 1, with a program for each block of a row.
Bytes: g and u are read once, y is written once. g and u may be views of one product. They are partial results, whose
sums are rounded to the data type of y before the gate, see `partial_results.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator
from parallelformers_ng.kernels.triton.partial_results import load_sum, row_distance

_BLOCK = 1024


@triton.jit
def gate_kernel(g, u, y, columns, g_row, u_row, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row. `g_row` and `u_row` are distances between rows, in elements."""
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = load_sum(g + row * g_row + column, rows * g_row, inside, y, SPLITS)
    up = load_sum(u + row * u_row + column, rows * u_row, inside, y, SPLITS)
    active = gate / (1.0 + tl.exp(-gate))
    tl.store(y + row * columns + column, (active * up).to(y.dtype.element_ty), mask=inside)


def gate_launches(g: Tensor, u: Tensor, dtype: torch.dtype) -> tuple[tuple[Launch], Tensor]:
    """Return the launch that computes y = silu(g) ⊙ u, and its output y, `[rows, columns]`, contiguous.

    Args:
        g, u: partial results, `[splits, rows, columns]`, dense along the columns.
        dtype: data type of y.
    """
    splits, rows, columns = g.shape
    y = torch.empty((rows, columns), dtype=dtype, device=g.device)
    arguments: dict[str, Any] = {"g": g, "u": u, "y": y, "columns": columns}
    arguments |= {"g_row": row_distance(g), "u_row": row_distance(u)}
    constants: dict[str, Any] = {"SPLITS": splits, "BLOCK": _BLOCK}
    return (Launch(gate_kernel, (rows, -(-columns // _BLOCK)), arguments, constants),), y


gated = operator("gated(Tensor g, Tensor u, ScalarType dtype) -> Tensor", gate_launches)
