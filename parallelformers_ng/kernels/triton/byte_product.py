"""Products of 1 to 32 rows with weights of 8 bits, as they lie: integers, or fp8 (e4m3).

    y = (x Qᵀ) ⊙ s + b          Q: `[outputs, inputs]` of 8 bits, s: an fp32 scale for each output

Up to three weights that read the same x are one product (q | k | v, gate | up). Each keeps its own tensors.

Numbers are widened to the data type of x, which holds all of them, and multiplied by tensor cores; sums are fp32.
fp8 is widened by shifts of its bits, for not every card from sm_80 on converts it.

Launches: 1. For many outputs, with a program for every 32 outputs. Each program sums over all inputs by itself. For few
outputs these programs would not keep a large card busy. Then there are programs for every 32 outputs and split of the
inputs, and y is partial results, in fp32:

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

MOST_ROWS = 32
MOST_WEIGHTS = 3
OUTPUTS_OF_PROGRAM = 32
_INPUTS_AT_ONCE = 256
_MANY_ROWS = 16
"""With more rows than these, x takes so much shared memory that a program reads half as many inputs at once."""
WARPS = 2
"""One for every 16 outputs: with more, two warps would widen the same numbers."""
_MOST_SPLITS = 16


@triton.jit
def _fp8_as_float32(bits):
    """Return the numbers of fp8 bits that were read as int8: an fp8 exponent counts from 7, one of float32 from 127.

    NaN, which no encoder writes, is read as 480.
    """
    placed = ((bits.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True)
    return placed * 1.329227995784916e36  # 2 ** 120


@triton.jit
def weight_and_tile(q0, q1, q2, s0, s1, s2, b0, b1, b2, outputs0, outputs1, outputs2, OUTPUTS: tl.constexpr):
    """Return the weight of this program: q, s, b, its outputs, the outputs of the weights before it, and its tile.

    A tile is OUTPUTS outputs of one weight; each weight counts its tiles from 0.
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


@triton.jit(do_not_specialize=["rows"])  # a recording has more rows than the step before it
def byte_product_kernel(
    x, q0, q1, q2, s0, s1, s2, b0, b1, b2, y,
    rows, inputs, splits, outputs0, outputs1, outputs2, x_row, y_row,
    BIASED: tl.constexpr, FP8: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one split of up to OUTPUTS outputs of one weight for all rows.

    `byte_product_launch` describes the arguments; y is the partial results, `[splits, rows, outputs]`. `x_row`
    and `y_row` are distances between rows, in elements.
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
    steps = tl.cdiv(inputs, INPUTS)  # a split begins at a multiple of INPUTS, so that its loads are 16 bytes wide
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


def byte_product_launch(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[Launch, Tensor]:
    """Return the launch that computes y = (x Qᵀ) ⊙ s + b, side by side for all weights Q, and its output.

    The output is a new tensor of partial results on the device of x, `[splits, rows, sum of the outputs]`.

    Args:
        x: `[rows, inputs]`, dense along the inputs, bf16 or fp16; at most 32 rows.
        weights: one to three tensors Q, `[outputs, inputs]`, contiguous, all int8 or all fp8 (e4m3).
        scales: one tensor s for each weight, `[outputs, 1]`, fp32, contiguous.
        biases: one tensor b for each weight, `[outputs]`; empty for no biases.
    """
    is_fp8 = weights[0].dtype is torch.float8_e4m3fn
    if is_fp8:
        weights = [weight.view(torch.int8) for weight in weights]
    constants: dict[str, Any] = {
        "BIASED": bool(biases),
        "FP8": is_fp8,
        "ROWS": _MANY_ROWS if len(x) <= _MANY_ROWS else MOST_ROWS,
        "INPUTS": at_once(_INPUTS_AT_ONCE, len(x)),
    }
    arguments = joint_arguments(x, weights, scales, biases)
    return split_launch(byte_product_kernel, x, weights, arguments, constants, stages=4)


def split_launch(
    kernel: Any, x: Tensor, weights: Sequence[Tensor], arguments: dict[str, Any], constants: dict[str, Any], stages: int
) -> tuple[Launch, Tensor]:
    """Return the launch of a product, and its output: new partial results, `[splits, rows, outputs]`.

    Args:
        kernel: kernel of the product.
        x: `[rows, inputs]`. If the inputs are not split, the output has its data type.
        weights: tensors, `[outputs, …]`.
        arguments: arguments of the kernel by name, apart from the output and the number of splits.
        constants: constants of the kernel by name, apart from the number of outputs of a program.
        stages: see `Launch`.
    """
    tiles, outputs = programs(weights), sum(weight.shape[0] for weight in weights)
    splits = splits_of(tiles, x.shape[1])
    shape = (splits, arguments["rows"], outputs)
    y = torch.empty(shape, dtype=x.dtype if splits == 1 else torch.float32, device=weights[0].device)
    arguments, constants = arguments | {"y": y, "splits": splits}, constants | {"OUTPUTS": OUTPUTS_OF_PROGRAM}
    return Launch(kernel, (tiles, splits), arguments, constants, warps=WARPS, stages=stages), y


def at_once(most: int, rows: int) -> int:
    """Return the number of inputs, or of their groups, that a program reads at once. Sums do not depend on it.

    Args:
        most: the number for few rows.
        rows: number of rows of x.
    """
    return most if rows <= _MANY_ROWS else most // 2


def splits_of(tiles: int, inputs: int) -> int:
    """Return the number of splits of the inputs, 1 to 16.

    The number does not depend on the rows: a recording has more rows than the step before it. Each split has at least
    two iterations of the kernel's loop.

    Args:
        tiles: number of programs that cover the outputs.
        inputs: number of inputs.
    """
    steps = -(-inputs // _INPUTS_AT_ONCE)
    return splits_for(tiles, min(_MOST_SPLITS, steps // 2))


def joint_arguments(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> dict[str, Any]:
    """Return the arguments that kernels of products take for one to three weights, by name.

    The kernels have arguments for three weights. In the place of a missing weight, a kernel gets the first weight with
    0 outputs; in the place of a missing bias, scales, which it does not read. Triton 3.6 cannot return None from a
    function of a kernel.

    Args:
        x: `[rows, inputs]`, dense along the inputs.
        weights: one to three tensors, `[outputs, …]`.
        scales: one tensor for each weight.
        biases: one tensor for each weight; empty for no biases.

    Raises:
        ValueError: `x` has more than MOST_ROWS rows.
    """
    rows, inputs = x.shape
    if rows > MOST_ROWS:
        raise ValueError(f"x has {rows} rows; the kernel multiplies up to {MOST_ROWS}")
    arguments: dict[str, Any] = {"x": x, "rows": rows, "inputs": inputs, "x_row": x.stride(0)}
    arguments["y_row"] = sum(weight.shape[0] for weight in weights)
    for place in range(MOST_WEIGHTS):
        at = place if place < len(weights) else 0
        arguments |= {f"q{place}": weights[at], f"s{place}": scales[at], f"b{place}": (biases or scales)[at]}
        arguments[f"outputs{place}"] = weights[at].shape[0] if at == place else 0
    return arguments


def programs(weights: Sequence[Tensor]) -> int:
    """Return the number of programs for the outputs of some weights.

    A program computes up to 32 outputs of one weight.

    Args:
        weights: tensors, `[outputs, …]`.
    """
    return sum(-(-weight.shape[0] // OUTPUTS_OF_PROGRAM) for weight in weights)


@operator("byte_product(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases) -> Tensor")
def byte_product(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Return partial results of y = (x Qᵀ) ⊙ s + b, `[splits, rows, sum of the outputs]`, for all weights Q.

    Args:
        x: `[…, inputs]`, bf16 or fp16; at most 32 rows in all.
        weights: one to three tensors, `[outputs, inputs]`, contiguous, all int8 or all fp8 (e4m3).
        scales: one tensor for each weight, `[outputs, 1]`, fp32, contiguous.
        biases: one tensor for each weight, `[outputs]`; empty for no biases.
    """
    launch, y = byte_product_launch(x.reshape(-1, x.shape[-1]), weights, scales, biases)
    launch.run()
    return y
