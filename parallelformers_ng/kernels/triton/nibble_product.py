"""Products of 1 to 32 rows with weights of 4 bits, read as stored, with a scale for each group of 32 inputs.

y = x Wᵀ + b           W = Q ⊙ s, rounded to the data type of x
Q: `[outputs, inputs / 2]`, two numbers in a byte, the first one in its low bits; s: `[outputs, inputs / 32]`

Low and high bits stay apart: x is read as words of 32 bits, whose halves are the inputs of the low and of the high
numbers. Tensor cores multiply, sums are fp32.

One launch multiplies x by up to three weights, which stay separate tensors.

Launches: 1. For few outputs y is partial results, in fp32, see `byte_product.py`.
Bytes: Q and s are read once, y is written once. x is read by every program, see `byte_product.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.byte_product import at_once, product_launches, weight_and_tile
from parallelformers_ng.kernels.triton.launch import Launch, operator

GROUP = 32
_GROUPS_AT_ONCE = 8
# Tensor cores multiply at least 8 rows, so the kernel pads fewer rows.
_MIN_ROWS = 8

# PTX for four bytes `$4` and the scales `$5`, `$6` of their numbers: the low numbers times the scales go to `$0` and
# `$1`, the high ones to `$2` and `$3`, two numbers in a register. A number with its sign bit inverted becomes the last
# bits of a float whose last bit counts 1, so subtracting `offset` leaves the number; `(a & b) ^ c` is 0x6A. The
# compiler alone needs twice as many instructions (counted in the code for sm_90).
_TWO_AT_ONCE = """
{{
.reg .b32 high, first, second, third, fourth, one, offset;
mov.b32 one, {one};
mov.b32 offset, {offset};
shr.b32 high, $4, 4;
prmt.b32 first, $4, {exponent}, 0x4140;
prmt.b32 second, $4, {exponent}, 0x4342;
prmt.b32 third, high, {exponent}, 0x4140;
prmt.b32 fourth, high, {exponent}, 0x4342;
lop3.b32 first, first, 0xFF0FFF0F, 0x00080008, 0x6A;
lop3.b32 second, second, 0xFF0FFF0F, 0x00080008, 0x6A;
lop3.b32 third, third, 0xFF0FFF0F, 0x00080008, 0x6A;
lop3.b32 fourth, fourth, 0xFF0FFF0F, 0x00080008, 0x6A;
fma.rn.{type} first, first, one, offset;
fma.rn.{type} second, second, one, offset;
fma.rn.{type} third, third, one, offset;
fma.rn.{type} fourth, fourth, one, offset;
mov.b32 offset, 0x80008000;
fma.rn.{type} $0, first, $5, offset;
fma.rn.{type} $1, second, $6, offset;
fma.rn.{type} $2, third, $5, offset;
fma.rn.{type} $3, fourth, $6, offset;
}}
"""
# In bf16, a number with its sign bit inverted becomes the last bits of 128 + 0 … 15.
_BF16 = tl.constexpr(_TWO_AT_ONCE.format(type="bf16x2", exponent="0x43", one="0x3F803F80", offset="0xC308C308"))
# In fp16, a number with its sign bit inverted becomes the last bits of 1024 + 0 … 15.
_FP16 = tl.constexpr(_TWO_AT_ONCE.format(type="f16x2", exponent="0x64", one="0x3C003C00", offset="0xE408E408"))


@triton.jit
def _both_scaled(numbers, scales):
    """Dequantize the low and the high 4-bit number of each byte, rounded like a dequantized weight in memory."""
    return tl.inline_asm_elementwise(
        _BF16 if scales.dtype == tl.bfloat16 else _FP16,
        "=r,=r,=r,=r,r,r,r",
        [numbers, scales],
        dtype=(scales.dtype, scales.dtype),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _scaled(numbers, scales):
    """Dequantize the low 4-bit number of each byte without PTX, for Triton's interpreter."""
    bits = ((numbers.to(tl.int32) & 15) ^ 8) | 0x4B000000
    return ((bits.to(tl.float32, bitcast=True) - 8388616.0) * scales.to(tl.float32)).to(scales.dtype)


@triton.jit(do_not_specialize=["rows", "group_steps"])
def nibble_product_kernel(
    x, q0, q1, q2, s0, s1, s2, b0, b1, b2, y,
    rows, inputs, splits, group_steps, outputs0, outputs1, outputs2, x_row, y_row,
    BIASED: tl.constexpr, PTX: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_STEP: tl.constexpr,
):  # fmt: skip
    """Write OUTPUTS outputs of one weight to the partial results y, `[splits, rows, outputs]`, for all rows and one
    split of the inputs. `inputs` and `x_row` count pairs of inputs. A row of scales has GROUP_STEP · `group_steps`
    scales, so that the compiler knows their alignment, and loads several scales at once.
    """
    split = tl.program_id(1)
    q, s, b, outputs, left, tile = weight_and_tile(
        q0, q1, q2, s0, s1, s2, b0, b1, b2, outputs0, outputs1, outputs2, OUTPUTS
    )
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output, is_row = output < outputs, row < rows
    groups = group_steps * GROUP_STEP
    numbers_at = q + output.to(tl.int64)[:, None] * inputs
    scales_at = s + output.to(tl.int64)[:, None] * groups
    pairs_at = x + row[None, :] * x_row
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    steps = tl.cdiv(groups, GROUPS)
    for start in range(split * steps // splits * GROUPS, (split + 1) * steps // splits * GROUPS, GROUPS):
        group = start + tl.arange(0, GROUPS)
        pair = start * 16 + tl.arange(0, GROUPS * 16)
        is_pair = pair < inputs
        numbers = tl.load(numbers_at + pair[None, :], mask=is_output[:, None] & is_pair[None, :], other=0)
        scales = tl.load(scales_at + group[None, :], mask=is_output[:, None] & (group < groups)[None, :], other=0.0)
        pairs = tl.load(pairs_at + pair[:, None], mask=is_pair[:, None] & is_row[None, :], other=0)
        wide = tl.reshape(tl.broadcast_to(scales[:, :, None], [OUTPUTS, GROUPS, 16]), [OUTPUTS, GROUPS * 16])
        if PTX:
            low, high = _both_scaled(numbers, wide)
        else:
            low, high = _scaled(numbers, wide), _scaled(numbers >> 4, wide)
        first = (pairs & 0xFFFF).to(tl.uint16).to(scales.dtype, bitcast=True)
        second = ((pairs >> 16) & 0xFFFF).to(tl.uint16).to(scales.dtype, bitcast=True)
        sums = tl.dot(low, first, sums)
        sums = tl.dot(high, second, sums)
    if BIASED and split == 0:
        sums += tl.load(b + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    place = y + (split * rows + row)[None, :] * y_row + left + output[:, None]
    tl.store(place, sums.to(y.dtype.element_ty), mask=is_output[:, None] & is_row[None, :])


def nibble_product_launches(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
) -> tuple[tuple[Launch], Tensor]:
    """Return the launch that computes y = x Wᵀ + b for all weights W = Q ⊙ s, and its output y.

    y has partial results, `[splits, rows, sum of the outputs]`, with the outputs of the weights side by side.

    Args:
        x: `[…, inputs]`, bf16 or fp16, at an address that is a multiple of 4; at most 32 rows in all.
        weights: one to three tensors Q, `[outputs, inputs / 2]`, contiguous, uint8.
        scales: one tensor s for each weight, `[outputs, inputs / 32]`, of the data type of x, contiguous.
        biases: one tensor for each weight, `[outputs]`; empty for no biases.
    """
    x = x.reshape(-1, x.shape[-1]).contiguous()
    pairs, groups = x.view(torch.int32), scales[0].shape[1]
    group_step = math.gcd(groups, _GROUPS_AT_ONCE)
    others = {"x": pairs, "inputs": pairs.shape[1], "x_row": pairs.stride(0), "group_steps": groups // group_step}
    constants: dict[str, Any] = {
        "PTX": isinstance(nibble_product_kernel, triton.JITFunction),
        "ROWS": max(_MIN_ROWS, triton.next_power_of_2(len(x))),
        "GROUPS": at_once(_GROUPS_AT_ONCE, len(x)),
        "GROUP_STEP": group_step,
    }
    signed = [weight.view(torch.int8) for weight in weights]
    return product_launches(nibble_product_kernel, x, signed, scales, biases, others, constants, stages=3)


nibble_product = operator(
    "nibble_product(Tensor x, Tensor[] weights, Tensor[] scales, Tensor[] biases) -> Tensor", nibble_product_launches
)
