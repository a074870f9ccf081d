"""The sum of a product's partial results.

y = p₀ + p₁ + … , in fp32, then rounded to the data type of the model       p: `[splits, rows, outputs]`

The products of this package return `[splits, rows, outputs]`: fp32 if their inputs are split among programs,
otherwise y itself with one split. The kernels that read a product add its partial results as they load them, by
`load_sum`: the norm, the gate, and the rotary positions. Their docstrings call such a tensor partial results, also
with one split.

`summed` is for other readers, such as a sum over ranks.

Launches: 1; for one split, none.
Bytes: p is read once, y is written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator

_SUMS_AT_ONCE = 256


@triton.jit
def load_sum(place, step, mask, like, SPLITS: tl.constexpr):
    """Load partial results, add their splits in order, and return the sum in float32, rounded to the data type of
    `like`.

    All kernels that read a product use this function, so all of them get the same bits.

    Args:
        place: pointers to the partial results of the first split.
        step: distance between splits, in elements.
        mask: True for results to load; the other results are 0.
        like: pointer to numbers of the model's data type.
    """
    if SPLITS == 1:
        sums = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    else:
        sums = tl.zeros(mask.shape, tl.float32)
        for split in tl.static_range(SPLITS):
            sums += tl.load(place + split * step, mask=mask, other=0.0)
        sums = sums.to(like.dtype.element_ty).to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(p, y, rows, outputs, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows * outputs
    tl.store(y + at, load_sum(p + at, rows * outputs, inside, y, SPLITS).to(y.dtype.element_ty), mask=inside)


def row_distance(p: Tensor) -> int:
    """Return the distance between rows of partial results, in elements. Raises ValueError for splits that are not
    adjacent in memory, which the kernels cannot read.

    Args:
        p: partial results of a product, `[splits, rows, outputs]`, or of some of its outputs.
    """
    splits, rows, _ = p.shape
    if splits > 1 and p.stride(0) != rows * p.stride(1):
        raise ValueError(f"partial results of {rows} rows have strides {p.stride()}; the first must be the rows' sum")
    return p.stride(1)


def sum_launches(p: Tensor, dtype: torch.dtype) -> tuple[tuple[Launch], Tensor]:
    """Return the launch that adds the splits of p, which must be contiguous, and its output, `[rows, outputs]`."""
    splits, rows, outputs = p.shape
    y = torch.empty((rows, outputs), dtype=dtype, device=p.device)
    arguments: dict[str, Any] = {"p": p, "y": y, "rows": rows, "outputs": outputs}
    constants: dict[str, Any] = {"SPLITS": splits, "BLOCK": _SUMS_AT_ONCE}
    return (Launch(sum_kernel, (-(-rows * outputs // _SUMS_AT_ONCE),), arguments, constants, warps=2),), y


sum_of_splits = operator("sum_of_splits(Tensor p, ScalarType dtype) -> Tensor", sum_launches)


def summed(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the splits of partial results, `[splits, rows, outputs]`. With one split, the result is a view."""
    return p[0] if len(p) == 1 else sum_of_splits(p, dtype)
