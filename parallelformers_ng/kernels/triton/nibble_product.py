"""Products of 1 to 16 rows with weights of 4 bits, in groups of 32 inputs with a scale each, as they lie.

    y = x Wᵀ + b           W = Q ⊙ s, rounded to the data type of x
    Q: `[outputs, inputs / 2]`, two numbers in a byte, the first one in its low bits; s: `[outputs, inputs / 32]`

The 16 bytes of a group are one load. Low and high bits stay apart: x is read as words of 32 bits, whose halves are the
inputs of the low and of the high numbers. Tensor cores multiply, sums are fp32.

Up to three weights that read the same x are one launch. Each keeps its own tensors.

Launches: 1, with a program for every 32 outputs. Each program sums over all inputs by itself.
Bytes: Q and s are read once, y is written once. x is read by every program, see `byte_product.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from parallelformers_ng.kernels.triton.byte_product import (
    MOST_ROWS,
    OUTPUTS_OF_PROGRAM,
    WARPS,
    joint_arguments,
    programs,
)
from parallelformers_ng.kernels.triton.launch import Launch, operator

GROUP = 32
_GROUPS_AT_ONCE = 8


@triton.jit
def _scaled(integers, scales, OUTPUTS: tl.constexpr, PAIRS: tl.constexpr):
    """Return integers times the scales of their groups, `[OUTPUTS, PAIRS]`, rounded as a weight in memory is."""
    bits = ((integers.to(tl.int32) & 15) ^ 8) | 0x4B000000
    wide = (bits.to(tl.float32, bitcast=True) - 8388616.0) * scales.to(tl.float32)[:, :, None]
    return tl.reshape(wide.to(scales.dtype), [OUTPUTS, PAIRS])


@triton.jit(do_not_specialize=["rows"])
def nibble_product_kernel(
    x, q0, q1, q2, s0, s1, s2, b0, b1, b2, y,
    rows, inputs, outputs0, outputs1, outputs2, x_row, y_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Compute up to OUTPUTS outputs of one weight for all rows. `nibble_product_launch` describes the arguments.

    `inputs` and `x_row` count pairs of inputs. `x_row` and `y_row` are distances between rows.
    """
    tile = tl.program_id(0)
    q, s, b, outputs, left = q0, s0, b0, outputs0, 0
    if tile >= tl.cdiv(outputs0, OUTPUTS):
        tile -= tl.cdiv(outputs0, OUTPUTS)
        q, s, b, outputs, left = q1, s1, b1, outputs1, outputs0
        if tile >= tl.cdiv(outputs1, OUTPUTS):
            tile -= tl.cdiv(outputs1, OUTPUTS)
            q, s, b, outputs, left = q2, s2, b2, outputs2, outputs0 + outputs1
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row, byte = tl.arange(0, ROWS), tl.arange(0, 16)
    is_output, is_row = output < outputs, row < rows
    groups = inputs // 16
    numbers_at = q + output.to(tl.int64)[:, None, None] * inputs + byte[None, None, :]
    scales_at = s + output.to(tl.int64)[:, None] * groups
    pairs_at = x + row[None, :] * x_row
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        pair = start * 16 + tl.arange(0, GROUPS * 16)
        within = is_output[:, None] & (group < groups)[None, :]
        numbers = tl.load(numbers_at + group[None, :, None] * 16, mask=within[:, :, None], other=0)
        scales = tl.load(scales_at + group[None, :], mask=within, other=0.0)
        pairs = tl.load(pairs_at + pair[:, None], mask=(pair < inputs)[:, None] & is_row[None, :], other=0)
        low = _scaled(numbers, scales, OUTPUTS, GROUPS * 16)
        high = _scaled(numbers >> 4, scales, OUTPUTS, GROUPS * 16)
        first = (pairs & 0xFFFF).to(tl.uint16).to(scales.dtype, bitcast=True)
        second = ((pairs >> 16) & 0xFFFF).to(tl.uint16).to(scales.dtype, bitcast=True)
        sums = tl.dot(low, first, sums)
        sums = tl.dot(high, second, sums)
    if b is not None:
        sums += tl.load(b + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = y + row[None, :] * y_row + left + output[:, None]
    tl.store(place, sums.to(y.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def nibble_product_launch(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor], y: Tensor
) -> Launch:
    """Return the launch that writes y = x Wᵀ + b, side by side for all weights W = Q ⊙ s.

    Args:
        x: `[rows, inputs]`, contiguous, bf16 or fp16, at an address that is a multiple of 4; at most 16 rows.
        weights: one to three tensors Q, `[outputs, inputs / 2]`, contiguous, uint8. A byte has two 4-bit integers; its
            low bits are the first integer.
        scales: one tensor s for each weight, `[outputs, inputs / 32]`, of the data type of x, contiguous.
        biases: one tensor for each weight, `[outputs]`; empty for no biases.
        y: output, `[rows, sum of the outputs]`, contiguous.
    """
    signed = [weight.view(torch.int8) for weight in weights]
    constants = {"ROWS": MOST_ROWS, "OUTPUTS": OUTPUTS_OF_PROGRAM, "GROUPS": _GROUPS_AT_ONCE}
    arguments = joint_arguments(x.view(torch.int32), signed, scales, biases, y)
    return Launch(nibble_product_kernel, (programs(weights),), arguments, constants, warps=WARPS, stages=4)


@operator("nibble_product(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases) -> Tensor")
def nibble_product(x: Tensor, weights: list[Tensor], scales: list[Tensor], biases: list[Tensor]) -> Tensor:
    """Return y = x Wᵀ + b, `[…, sum of the outputs]`, side by side for all weights W = Q ⊙ s.

    Args:
        x: `[…, inputs]`, bf16 or fp16; at most 16 rows in all.
        weights: one to three tensors Q, `[outputs, inputs / 2]`, contiguous, uint8. A byte has two 4-bit integers; its
            low bits are the first integer.
        scales: one tensor s for each weight, `[outputs, inputs / 32]`, of the data type of x, contiguous.
        biases: one tensor for each weight, `[outputs]`; empty for no biases.
    """
    outputs = sum(weight.shape[0] for weight in weights)
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    states = x.reshape(-1, x.shape[-1]).contiguous()
    nibble_product_launch(states, weights, scales, biases, y.view(-1, outputs)).run()
    return y


def nibble_product_twin(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> Tensor:
    """Return the result of `nibble_product`, computed by plain torch. Each weight is dequantized in memory.

    Args:
        x, weights, scales, biases: the arguments of `nibble_product`, with any number of rows and weights.
    """
    outputs = []
    for weight, scale in zip(weights, scales, strict=True):
        signed = weight.view(torch.int8)
        numbers = torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(1)
        whole = (numbers.unflatten(1, (-1, GROUP)) * scale.unsqueeze(-1)).flatten(1).to(x.dtype)
        outputs.append(functional.linear(x, whole))
    if biases:
        outputs = [output + bias for output, bias in zip(outputs, biases, strict=True)]
    return torch.cat(outputs, -1)
