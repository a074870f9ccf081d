"""Products of 1 to 32 rows with weights of 8 bits, read as stored: integers, or fp8 (e4m3).

y = (x Qᵀ) ⊙ s + b          Q: `[outputs, inputs]` of 8 bits, s: an fp32 scale for each output

One launch multiplies x by up to three weights (q | k | v, gate | up), which stay separate tensors.

Numbers are widened to the data type of x, which holds all of them, and multiplied by tensor cores; sums are fp32.
fp8 is widened by shifts of its bits, for not every card from sm_80 on converts it.

Launches: 1. For many outputs, each program computes 32 outputs, and sums over all inputs by itself. For few outputs,
so few programs would not keep a large card busy. Then each program sums over one split of the inputs, and y has
partial results, in fp32:

    p = (x Qᵀ over the inputs of the split) ⊙ s, and + b in the first split.

The kernel that reads y adds them in the order of the splits, see `partial_results.py`: the same call gives the same
bits. The splits depend on the weights, not on the rows.

Bytes: Q and s are read once, y is written once. x is read by every program, from the second one on from the cache of
the card: 2 · rows / 32 bytes for each number of Q. With splits, each split reads s, and p is written:
4 · rows · splits / inputs bytes for each number of Q, at most about rows / 128. The reader reads as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator, splits_for

MAX_ROWS = 32
MAX_WEIGHTS = 3
OUTPUTS_OF_PROGRAM = 32
_INPUTS_AT_ONCE = 256
# With more rows, x fills so much shared memory that a program reads half as many inputs at once.
_MANY_ROWS = 16
# Each warp of a program computes 16 outputs. With more warps, two would widen the same numbers.
WARPS = 2
_MAX_SPLITS = 16


@triton.jit
def _fp8_as_float32(bits):
    """Convert fp8 numbers (e4m3), whose bits were read as int8, to float32. NaN becomes 480, but no encoder writes
    NaN."""
    placed = ((bits.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True)
    return placed * 1.329227995784916e36  # 2¹²⁰, because the bias of exponents is 127 in float32, and 7 in fp8


@triton.jit
def weight_and_tile(q0, q1, q2, s0, s1, s2, b0, b1, b2, outputs0, outputs1, outputs2, OUTPUTS: tl.constexpr):
    """Return this program's weight and tile: q, s, b, number of outputs of the weight, number of outputs of the weights
    before it, and number of the tile.

    A tile is OUTPUTS outputs of one weight. The tiles of each weight are numbered from 0.
    """
    tile = tl.program_id(0)
    q, s, b, outputs, left = q0, s0, b0, outputs0, 0
    if tile >= tl.cdiv(outputs0, OUTPUTS):
        tile -= tl.cdiv(outputs0, OUTPUTS)
        q, s, b, outputs, left = q1, s1, b1, outputs1, outputs0
        if tile >= tl.cdiv(outputs1, OUTPUTS):
            tile -= tl.cdiv(outputs1, OUTPUTS)
            q, s, b, outputs, left = q2, s2, b2, outputs2, outputs0 + outputs1
    return q, s, b, outputs, left, tile


@triton.jit(do_not_specialize=["rows"])  # another number of rows must not compile another kernel inside a CUDA graph
def byte_product_kernel(
    x, q0, q1, q2, s0, s1, s2, b0, b1, b2, y,
    rows, inputs, splits, outputs0, outputs1, outputs2, x_row, y_row,
    BIASED: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Write OUTPUTS outputs of one weight to the partial results y, `[splits, rows, outputs]`, for all rows and one
    split of the inputs. `x_row` and `y_row` are distances between rows, in elements.
    """
    split = tl.program_id(1)
    q, s, b, outputs, left, tile = weight_and_tile(
        q0, q1, q2, s0, s1, s2, b0, b1, b2, outputs0, outputs1, outputs2, OUTPUTS
    )
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output, is_row = output < outputs, row < rows
    numbers_at = q + output.to(tl.int64)[:, None] * inputs
    states_at = x + row[None, :] * x_row
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    steps = tl.cdiv(inputs, INPUTS)  # splits begin at multiples of INPUTS, so that loads are 16 bytes wide
    for start in range(split * steps // splits * INPUTS, (split + 1) * steps // splits * INPUTS, INPUTS):
        input = start + tl.arange(0, INPUTS)
        is_input = input < inputs
        numbers = tl.load(numbers_at + input[None, :], mask=is_output[:, None] & is_input[None, :], other=0)
        states = tl.load(states_at + input[:, None], mask=is_input[:, None] & is_row[None, :], other=0.0)
        wide = _fp8_as_float32(numbers) if FP8 else numbers.to(tl.float32)
        sums = tl.dot(wide.to(x.dtype.element_ty), states, sums)
    scales = tl.load(s + output, mask=is_output, other=0.0)
    sums *= scales[:, None]
    if BIASED and split == 0:
        sums += tl.load(b + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = y + (split * rows + row)[None, :] * y_row + left + output[:, None]
    tl.store(place, sums.to(y.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def byte_product_launches(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[tuple[Launch], Tensor]:
    """Return the launch that computes y = (x Qᵀ) ⊙ s + b for all weights Q, and its output y.

    y has partial results, `[splits, rows, sum of the outputs]`, with the outputs of the weights side by side.

    Args:
        x: `[…, inputs]`, dense along the inputs, bf16 or fp16; at most 32 rows in all.
        weights: one to three tensors Q, `[outputs, inputs]`, contiguous, all int8 or all fp8 (e4m3).
        scales: one tensor s for each weight, `[outputs, 1]`, fp32, contiguous.
        biases: one tensor b for each weight, `[outputs]`; empty for no biases.
    """
    x = x.reshape(-1, x.shape[-1])
    is_fp8 = weights[0].dtype is torch.float8_e4m3fn
    if is_fp8:
        weights = [weight.view(torch.int8) for weight in weights]
    rows = _MANY_ROWS if len(x) <= _MANY_ROWS else MAX_ROWS
    constants = {"FP8": is_fp8, "ROWS": rows, "INPUTS": at_once(_INPUTS_AT_ONCE, len(x))}
    return product_launches(byte_product_kernel, x, weights, scales, biases, {}, constants, stages=4)


def product_launches(
    kernel: Any, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor],
    others: dict[str, Any], constants: dict[str, Any], stages: int,
) -> tuple[tuple[Launch], Tensor]:  # fmt: skip
    """Return the launch of a kernel that multiplies x by one to three weights, and its output y.

    The kernel has arguments for three weights, because Triton 3.6 cannot return None from a function that a kernel
    calls. A missing weight is the first weight with 0 outputs. A missing bias is a tensor of scales, which the kernel
    does not read.

    Args:
        x: `[rows, inputs]`. If the inputs are not split, the output has its data type.
        others: more arguments of the kernel, by name. They replace those for x and the weights that have the same name.
        constants: constants of the kernel by name, apart from BIASED and OUTPUTS.
    """
    rows, inputs = x.shape
    if rows > MAX_ROWS:
        raise ValueError(f"x has {rows} rows; the kernel multiplies up to {MAX_ROWS}")
    outputs = [len(weight) for weight in weights]
    tiles = sum(-(-each // OUTPUTS_OF_PROGRAM) for each in outputs)
    splits = splits_of(tiles, inputs)
    dtype = x.dtype if splits == 1 else torch.float32
    y = torch.empty((splits, rows, sum(outputs)), dtype=dtype, device=x.device)
    arguments: dict[str, Any] = {"x": x, "y": y, "rows": rows, "inputs": inputs, "splits": splits}
    arguments |= {"x_row": x.stride(0), "y_row": sum(outputs)}
    for place in range(MAX_WEIGHTS):
        at = place if place < len(weights) else 0
        arguments |= {f"q{place}": weights[at], f"s{place}": scales[at], f"b{place}": (biases or scales)[at]}
        arguments[f"outputs{place}"] = outputs[at] if at == place else 0
    constants = constants | {"BIASED": bool(biases), "OUTPUTS": OUTPUTS_OF_PROGRAM}
    return (Launch(kernel, (tiles, splits), arguments | others, constants, WARPS, stages),), y


def at_once(most: int, rows: int) -> int:
    """Return how many inputs, or groups of inputs, a program loads at once. The number does not change the sums."""
    return most if rows <= _MANY_ROWS else most // 2


def splits_of(tiles: int, inputs: int) -> int:
    """Choose into how many splits, 1 to 16, to divide the inputs of a product whose outputs take `tiles` programs.

    The number does not depend on the rows, because a CUDA graph with more rows must not compile another kernel. Each
    split has at least two iterations of the kernel's loop.
    """
    steps = -(-inputs // _INPUTS_AT_ONCE)
    return splits_for(tiles, min(_MAX_SPLITS, steps // 2))


byte_product = operator(
    "byte_product(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases) -> Tensor", byte_product_launches
)
