"""Rotary positions of queries and keys, and the write of keys and values into a slot cache.

    q ↦ q ⊙ cos + (−q₂ | q₁) ⊙ sin            (q₁ | q₂): the halves of a head of q.
    keys[row, head, p] = the same of k         values[row, head, p] = v         p: position of the row.

Norms of each head's query and key come first, if the attention has them: q ↦ q / √(mean(q²) + ε) ⊙ w.

Launches: 1, with a program for each row and head. Queries are rotated in place: a program reads its head before it
writes it, and no other one touches it. A position outside of the cache writes nothing.
Bytes: q, k, v, cos and sin are read once, q and a token of the cache are written once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator, power_of_two


@triton.jit
def _turned(states, w, cos, sin, column, inside, epsilon, HALF: tl.constexpr):
    """Load a head, norm it if it has a norm, and return its rotated halves."""
    first = tl.load(states + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(states + HALF + column, mask=inside, other=0.0).to(tl.float32)
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
    q, k, v, cos, sin, q_norm, k_norm, keys, values, positions,
    heads, kv_heads, room, q_row, k_row, v_row, cos_row, sin_row, position_row,
    key_row, key_head, value_row, value_head, epsilon,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one query head, or write one key head or value head to the cache.

    `rotary_launch` describes the arguments. Names that end in `_row` or `_head` are distances in elements. `room` is
    the number of positions of the cache.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    position = tl.load(positions + row * position_row).to(tl.int64)
    is_query, is_key = head < heads, head < heads + kv_heads
    if is_query:
        place = q + row * q_row + head * 2 * HALF
        first, second = _turned(place, q_norm, cos + row * cos_row, sin + row * sin_row, column, inside, epsilon, HALF)
        tl.store(place + column, first.to(q.dtype.element_ty), mask=inside)
        tl.store(place + HALF + column, second.to(q.dtype.element_ty), mask=inside)
    elif (position >= 0) & (position < room):
        if is_key:
            head -= heads
            first, second = _turned(
                k + row * k_row + head * 2 * HALF, k_norm, cos + row * cos_row, sin + row * sin_row,
                column, inside, epsilon, HALF,
            )  # fmt: skip
            place = keys + row * key_row + head.to(tl.int64) * key_head + position * 2 * HALF
            tl.store(place + column, first.to(keys.dtype.element_ty), mask=inside)
            tl.store(place + HALF + column, second.to(keys.dtype.element_ty), mask=inside)
        else:
            head -= heads + kv_heads
            source = v + row * v_row + head * 2 * HALF
            place = values + row * value_row + head.to(tl.int64) * value_head + position * 2 * HALF
            tl.store(place + column, tl.load(source + column, mask=inside), mask=inside)
            tl.store(place + HALF + column, tl.load(source + HALF + column, mask=inside), mask=inside)


def rotary_launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    epsilon: float, keys: Tensor, values: Tensor, positions: Tensor,
) -> Launch:  # fmt: skip
    """Return the launch that rotates q in place, and writes rotated k and unchanged v to the cache.

    Args:
        q: queries, `[rows, heads · width]`, dense along the last dimension.
        k, v: keys and values of one new token of each row, `[rows, kv_heads · width]`, dense along the last dimension.
        cos, sin: cosines and sines of the positions, `[rows or 1, width]`, dense along the last dimension.
        q_norm, k_norm: weights of the RMS norms of each head, `[width]`; None for no norm.
        epsilon: ε of both norms.
        keys, values: cache, `[rows, kv_heads, positions, width]`, dense along the last two dimensions.
        positions: place of the new token in the cache, `[rows]` or `[1]`, integers. A token with a place outside of the
            cache is not written.
    """
    rows, kv_heads, room, width = keys.shape
    heads = q.shape[1] // width
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "q_norm": q_norm, "k_norm": k_norm}
    arguments |= {"keys": keys, "values": values, "positions": positions}
    arguments |= {"heads": heads, "kv_heads": kv_heads, "room": room}
    arguments |= {"q_row": q.stride(0), "k_row": k.stride(0), "v_row": v.stride(0)}
    arguments |= {"cos_row": row_step(cos), "sin_row": row_step(sin), "position_row": row_step(positions)}
    arguments |= {"key_row": keys.stride(0), "key_head": keys.stride(1)}
    arguments |= {"value_row": values.stride(0), "value_head": values.stride(1), "epsilon": epsilon}
    constants: dict[str, Any] = {"HALF": width // 2, "BLOCK": power_of_two(width // 2)}
    return Launch(rotary_kernel, (rows, heads + 2 * kv_heads), arguments, constants, warps=1)


def row_step(tensor: Tensor) -> int:
    """Return the distance between the rows of a tensor, in elements; 0 if the tensor has one row for all rows."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


@operator(
    "rotate_and_write(Tensor(a!) q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, Tensor? k_norm,"
    " float epsilon, Tensor(b!) keys, Tensor(c!) values, Tensor positions) -> ()"
)
def rotate_and_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    epsilon: float, keys: Tensor, values: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """Rotate q in place, and write rotated k and unchanged v to the cache.

    Args:
        q, k, v, cos, sin, q_norm, k_norm, epsilon, keys, values, positions: the arguments of `rotary_launch`.
    """
    rotary_launch(q, k, v, cos, sin, q_norm, k_norm, epsilon, keys, values, positions).run()


def rotary_twin(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    epsilon: float, keys: Tensor, values: Tensor, positions: Tensor,
) -> None:  # fmt: skip
    """Change q, keys and values as `rotate_and_write` does, by plain torch.

    Args:
        q, k, v, cos, sin, q_norm, k_norm, epsilon, keys, values, positions: the arguments of `rotary_launch`.
    """
    rows, kv_heads, room, width = keys.shape

    def turned(states: Tensor, w: Tensor | None) -> Tensor:
        heads = states.reshape(rows, -1, width)
        if w is not None:
            heads = (heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon) * w).to(states.dtype)
        first, second = heads.chunk(2, -1)
        return heads * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)

    q.copy_(turned(q, q_norm).flatten(1))
    new = turned(k, k_norm), v.reshape(rows, kv_heads, width)
    for row, position in enumerate(positions.expand(rows).tolist()):
        if 0 <= position < room:
            for cache, states in zip((keys, values), new, strict=True):
                cache[row, :, position] = states[row]
