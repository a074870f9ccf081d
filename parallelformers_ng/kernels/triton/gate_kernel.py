"""The gate of a feed-forward.

    y = act(g) ⊙ u         act: SiLU, GELU, or GELU by tanh

Launches: 1, with a program for each piece of a row.
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

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_BLOCK = 1024


@triton.jit
def gate_kernel(
    g, u, y, columns, g_row, u_row, ACTIVATION: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute up to BLOCK columns of one row of y = act(g) * u. `gate_launch` describes the arguments.

    `g_row` and `u_row` are distances between rows, in elements.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = load_sum(g + row * g_row + column, rows * g_row, inside, y, SPLITS)
    up = load_sum(u + row * u_row + column, rows * u_row, inside, y, SPLITS)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # 0.5 · (1 + tanh z) is the sigmoid of 2z
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-inner))
    tl.store(y + row * columns + column, (active * up).to(y.dtype.element_ty), mask=inside)


def gate_launch(g: Tensor, u: Tensor, y: Tensor, activation: str) -> Launch:
    """Return the launch that writes y = act(g) ⊙ u.

    Args:
        g, u: partial results, `[splits, rows, columns]`, dense along the columns.
        y: output, `[rows, columns]`, contiguous.
        activation: name of act, one of `ACTIVATIONS`.
    """
    splits, rows, columns = g.shape
    arguments: dict[str, Any] = {"g": g, "u": u, "y": y, "columns": columns}
    arguments |= {"g_row": row_distance(g), "u_row": row_distance(u)}
    constants: dict[str, Any] = {"ACTIVATION": activation, "SPLITS": splits, "BLOCK": _BLOCK}
    return Launch(gate_kernel, (rows, -(-columns // _BLOCK)), arguments, constants)


@operator("gated(Tensor g, Tensor u, str activation, ScalarType dtype) -> Tensor")
def gated(g: Tensor, u: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Return y = act(g) ⊙ u, `[rows, columns]`, contiguous.

    Args:
        g, u, activation: the arguments of `gate_launch`.
        dtype: data type of y.
    """
    y = torch.empty(g.shape[1:], dtype=dtype, device=g.device)
    gate_launch(g, u, y, activation).run()
    return y
