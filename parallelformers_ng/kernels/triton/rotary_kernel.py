"""Rotary positions of queries and keys, and the write of keys and values into a slot cache.

q ↦ q ⊙ cos + (−q₂ | q₁) ⊙ sin            (q₁ | q₂): the halves of a head of q.
keys[row, head, p] = the same of k         values[row, head, p] = v         p: position of the row.

Norms of each head's query and key come first, if the attention has them: q ↦ q / √(mean(q²) + ε) ⊙ w.

q, k and v are partial results, see `partial_results.py`. Their sums are rounded to the data type of the cache first.

Launches: 1, with a program for each row and head. A position outside of the cache writes nothing.
Bytes: q, k, v, cos and sin are read once, rotated q and a token of the cache are written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator
from parallelformers_ng.kernels.triton.partial_results import load_sum, row_distance


@triton.jit
def _turned(
    states, step, w, cos, sin, column, inside, epsilon, like, SPLITS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Return the two rotated halves of a head, after the norm if `w` is not None. `states` are partial results, `step`
    is the distance between their splits, and `like` a pointer to numbers of the cache's data type.
    """
    first = load_sum(states + column, step, inside, like, SPLITS)
    second = load_sum(states + HALF + column, step, inside, like, SPLITS)
    if w is not None:
        scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / (2 * HALF) + epsilon)
        first = first * scale * tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
        second = second * scale * tl.load(w + HALF + column, mask=inside, other=0.0).to(tl.float32)
    cos_first = tl.load(cos + column, mask=inside, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF + column, mask=inside, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + column, mask=inside, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF + column, mask=inside, other=0.0).to(tl.float32)
    return first * cos_first - second * sin_first, second * cos_second + first * sin_second


@triton.jit
def rotary_kernel(
    q, k, v, cos, sin, q_norm, k_norm, rotated, keys, values, positions,
    heads, kv_heads, room, q_row, k_row, v_row, cos_row, sin_row, position_row,
    key_row, key_head, value_row, value_head, epsilon,
    SPLITS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one query head, or write one key head or value head to the cache, which has `room` positions. Names that
    end in `_row` or `_head` are distances in elements.
    """
    row, head, rows = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    position = tl.load(positions + row * position_row).to(tl.int64)
    is_query, is_key = head < heads, head < heads + kv_heads
    if is_query:
        first, second = _turned(
            q + row * q_row + head * 2 * HALF, rows * q_row, q_norm, cos + row * cos_row, sin + row * sin_row,
            column, inside, epsilon, keys, SPLITS, HALF,
        )  # fmt: skip
        place = rotated + (row * heads + head) * 2 * HALF
        tl.store(place + column, first.to(rotated.dtype.element_ty), mask=inside)
        tl.store(place + HALF + column, second.to(rotated.dtype.element_ty), mask=inside)
    elif (position >= 0) & (position < room):
        if is_key:
            head -= heads
            first, second = _turned(
                k + row * k_row + head * 2 * HALF, rows * k_row, k_norm, cos + row * cos_row, sin + row * sin_row,
                column, inside, epsilon, keys, SPLITS, HALF,
            )  # fmt: skip
            place = keys + row * key_row + head.to(tl.int64) * key_head + position * 2 * HALF
        else:
            head -= heads + kv_heads
            source = v + row * v_row + head * 2 * HALF + column
            first = load_sum(source, rows * v_row, inside, values, SPLITS)
            second = load_sum(source + HALF, rows * v_row, inside, values, SPLITS)
            place = values + row * value_row + head.to(tl.int64) * value_head + position * 2 * HALF
        tl.store(place + column, first.to(keys.dtype.element_ty), mask=inside)
        tl.store(place + HALF + column, second.to(keys.dtype.element_ty), mask=inside)


def rotary_launches(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    epsilon: float, keys: Tensor, values: Tensor, positions: Tensor,
) -> tuple[tuple[Launch], Tensor]:  # fmt: skip
    """Return the launch that rotates queries and writes keys and values to the cache, and the rotated queries.

    The rotated queries are `[rows, heads · width]`, of the cache's data type. q, k and v are partial results with equal
    numbers of splits, dense along the last dimension.

    Args:
        q: queries, `[splits, rows, heads · width]`.
        k, v: keys and values of one new token of each row, `[splits, rows, kv_heads · width]`.
        cos, sin: cosines and sines of the positions, `[rows or 1, width]`, dense along the last dimension.
        q_norm, k_norm: weights of the RMS norms of each head, `[width]`; None for no norm.
        epsilon: ε of both norms.
        keys, values: cache, `[rows, kv_heads, positions, width]`, dense along the last two dimensions.
        positions: position of the new token in the cache, `[rows]` or `[1]`, integers. A token with a position outside
            of the cache is not written.
    """
    rows, kv_heads, room, width = keys.shape
    heads = q.shape[2] // width
    rotated = torch.empty(q.shape[1:], dtype=keys.dtype, device=q.device)
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm}
    arguments |= {"rotated": rotated, "keys": keys, "values": values, "positions": positions}
    arguments |= {"heads": heads, "kv_heads": kv_heads, "room": room, "epsilon": epsilon}
    arguments |= {"q_row": row_distance(q), "k_row": row_distance(k), "v_row": row_distance(v)}
    arguments |= {"cos_row": row_step(cos), "sin_row": row_step(sin), "position_row": row_step(positions)}
    arguments |= {"key_row": keys.stride(0), "key_head": keys.stride(1)}
    arguments |= {"value_row": values.stride(0), "value_head": values.stride(1)}
    constants: dict[str, Any] = {"SPLITS": len(q), "HALF": width // 2, "BLOCK": triton.next_power_of_2(width // 2)}
    return (Launch(rotary_kernel, (rows, heads + 2 * kv_heads), arguments, constants, warps=1),), rotated


def row_step(tensor: Tensor) -> int:
    """Return the distance between rows of a tensor, in elements; 0 if the tensor has one row, which all rows share."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


rotate_and_write = operator(
    "rotate_and_write(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm,"
    " float epsilon, Tensor(a!) keys, Tensor(b!) values, Tensor positions) -> Tensor",
    rotary_launches,
)
