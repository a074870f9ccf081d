"""The gate of a feed-forward.

    y = silu(g) ⊙ u

Launches: 1, with a program for each piece of a row.
Bytes: g and u are read once, y is written once. g and u may be views of one product.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from parallelformers_ng.kernels.triton.launch import Launch, operator

_BLOCK = 1024


@triton.jit
def gate_kernel(g, u, y, columns, g_row, u_row, BLOCK: tl.constexpr):
    """Compute up to BLOCK columns of one row of y = silu(g) * u. `gate_launch` describes the arguments.

    `g_row` and `u_row` are distances between rows, in elements.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(g + row * g_row + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(u + row * u_row + column, mask=inside, other=0.0).to(tl.float32)
    active = gate / (1.0 + tl.exp(-gate))
    tl.store(y + row * columns + column, (active * up).to(y.dtype.element_ty), mask=inside)


def gate_launch(g: Tensor, u: Tensor, y: Tensor) -> Launch:
    """Return the launch that writes y = silu(g) ⊙ u.

    Args:
        g, u: `[rows, columns]`, dense along the columns.
        y: output, `[rows, columns]`, contiguous.
    """
    rows, columns = g.shape
    arguments: dict[str, Any] = {"g": g, "u": u, "y": y, "columns": columns, "g_row": g.stride(0), "u_row": u.stride(0)}
    return Launch(gate_kernel, (rows, -(-columns // _BLOCK)), arguments, {"BLOCK": _BLOCK})


@operator("gated(Tensor g, Tensor u) -> Tensor")
def gated(g: Tensor, u: Tensor) -> Tensor:
    """Return y = silu(g) ⊙ u, contiguous.

    Args:
        g, u: `[rows, 1, columns]`, dense along the columns.
    """
    y = torch.empty(g.shape, dtype=g.dtype, device=g.device)
    gate_launch(g.flatten(0, -2), u.flatten(0, -2), y).run()
    return y


def gate_twin(g: Tensor, u: Tensor) -> Tensor:
    """Return the result of `gated`, computed by plain torch.

    Args:
        g, u: tensors of equal shape.
    """
    return functional.silu(g) * u
