"""Attention of one query of each row over a slot cache, `[rows, kv_heads, positions, width]`.

y = softmax(scale · q Kᵀ) V

Rows have lengths of their own, which lie on the device. A row attends to the positions that its window reaches and
its mask shows. A row that attends to nothing gets zeros. Query heads of one key/value head share its loads.

Launches: 2. In the first one, programs for each row, key/value head and split of the keys write partial results:

    m = max of the scores        l = Σ exp(score − m)        a = Σ exp(score − m) · V.

In the second one a program for each row and query head adds them up. It may count the new token as well: no program
of that launch reads the counter.

Bytes: q, and the keys and values of the attended positions, are read once, with a byte of the mask for each position
of a row and key/value head. Nothing else of the cache is read, whatever lies there. The partial results are written
once and read once: 4 · (width + 2) for each split and query head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallelformers_ng.kernels.triton.launch import Launch, operator, splits_for
from parallelformers_ng.kernels.triton.rotary_kernel import row_step

# `tl.dot` needs at least this size in each dimension, so smaller operands are padded.
MIN_SIDE = 16
_KEYS_AT_ONCE = 64
_MAX_SPLITS = 64


@triton.jit(do_not_specialize=["splits"])
def split_kernel(
    q, keys, values, mask, lengths, parts, largest, sums,
    kv_heads, groups, room, splits, window, q_row, key_row, key_head, value_row, value_head,
    mask_row, length_row, scale,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Attend to one split of the keys, for the `groups` query heads of one key/value head. It writes the largest score,
    the sum of the weights exp(score - largest), and the weighted sum of the values. Names that end in `_row` or `_head`
    are distances in elements; `room` is the number of positions.
    """
    pair, split = tl.program_id(0), tl.program_id(1)
    row, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    query, column = tl.arange(0, QUERIES), tl.arange(0, BLOCK)
    is_query, is_column = query < groups, column < WIDTH
    end = tl.minimum(tl.load(lengths + row * length_row).to(tl.int32) + 1, room)
    # A `window` of 0 shows all positions. Without the branch, Triton 3.9 needs more registers.
    start = 0
    if window > 0:
        start = tl.maximum(end - window, 0)
    of_split = tl.cdiv(tl.cdiv(end - start, splits), KEYS) * KEYS
    first = start + split * of_split
    last = tl.minimum(first + of_split, end)
    heads_at = (head * groups + query) * WIDTH
    states = tl.load(
        q + row * q_row + heads_at[:, None] + column[None, :], mask=is_query[:, None] & is_column[None, :], other=0.0
    )
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK], tl.float32)
    keys_at = keys + row * key_row + head * key_head + column[None, :]
    values_at = values + row * value_row + head * value_head + column[None, :]
    for at in range(first, last, KEYS):
        position = at + tl.arange(0, KEYS)
        shown = position < last
        if mask is not None:
            shown = tl.load(mask + row * mask_row + position, mask=shown, other=0) != 0
        place = position.to(tl.int64)[:, None] * WIDTH
        loaded = shown[:, None] & is_column[None, :]
        key = tl.load(keys_at + place, mask=loaded, other=0.0)
        scores = tl.dot(states, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(shown[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - anchor[:, None])
        shrink = tl.exp(highest - anchor)
        value = tl.load(values_at + place, mask=loaded, other=0.0)
        mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    slot = (row * kv_heads + head) * groups + query
    tl.store(largest + slot * splits + split, highest, mask=is_query)
    tl.store(sums + slot * splits + split, total, mask=is_query)
    if first < last:
        place = (slot * splits + split)[:, None] * WIDTH + column[None, :]
        tl.store(parts + place, mixed, mask=is_query[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["splits"])
def combine_kernel(
    parts, largest, sums, counter, y, splits,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one row and query head to attention y. One program also increments `counter`."""
    slot = tl.program_id(0).to(tl.int64)
    split, column = tl.arange(0, SPLITS), tl.arange(0, BLOCK)
    is_split, is_column = split < splits, column < WIDTH
    highest = tl.load(largest + slot * splits + split, mask=is_split, other=float("-inf"))
    total = tl.load(sums + slot * splits + split, mask=is_split, other=0.0)
    anchor = tl.max(highest)
    share = tl.exp(highest - tl.where(anchor == float("-inf"), 0.0, anchor))
    place = (slot * splits + split)[:, None] * WIDTH + column[None, :]
    part = tl.load(parts + place, mask=(is_split & (highest > float("-inf")))[:, None] & is_column[None, :], other=0.0)
    whole = tl.sum(total * share)
    mixed = tl.sum(part * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(y + slot * WIDTH + column, mixed.to(y.dtype.element_ty), mask=is_column)
    if counter is not None and slot == 0:
        tl.store(counter, tl.load(counter) + 1)


def attention_launches(
    q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float,
    mask: Tensor | None = None, counter: Tensor | None = None, window: int = 0,
) -> tuple[tuple[Launch, Launch], Tensor]:  # fmt: skip
    """Return the two launches that compute attention of one query of each row, and their output y, `[rows, heads ·
    width]`.

    The first launch computes partial results for splits of the keys, in fp32; the second launch combines them. The
    method is that of Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).

    Args:
        q: queries, `[rows, heads · width]`, dense along the last dimension.
        keys, values: cache, `[rows, kv_heads, positions, width]`, dense along the last two dimensions.
        lengths: number of earlier tokens of each row, `[rows]` or `[1]`, integers; a query also sees its own token.
        scale: factor of the scores.
        mask: bytes, `[rows or 1, positions]`; 0 hides a position. None hides no position.
        counter: one integer on the device that the second launch increases by 1; may be `lengths` of one element.
        window: number of last positions that a row attends to; 0 for all positions.
    """
    rows, kv_heads, room, width = keys.shape
    heads = q.shape[1] // width
    splits = splits_of(triton.next_power_of_2(rows) * kv_heads, room)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = torch.empty((rows * heads, splits, width), dtype=torch.float32, device=q.device)
    largest, sums = (parts.new_empty((rows * heads, splits)) for _ in range(2))
    partial: dict[str, Any] = {"parts": parts, "largest": largest, "sums": sums, "splits": splits}
    arguments: dict[str, Any] = partial | {"q": q, "keys": keys, "values": values, "mask": mask, "lengths": lengths}
    arguments |= {"kv_heads": kv_heads, "groups": heads // kv_heads, "room": room, "window": window, "scale": scale}
    arguments |= {"q_row": q.stride(0), "key_row": keys.stride(0), "key_head": keys.stride(1)}
    arguments |= {"value_row": values.stride(0), "value_head": values.stride(1)}
    arguments |= {"mask_row": 0 if mask is None else row_step(mask), "length_row": row_step(lengths)}
    shape: dict[str, Any] = {"WIDTH": width, "BLOCK": max(MIN_SIDE, triton.next_power_of_2(width))}
    queries = max(MIN_SIDE, triton.next_power_of_2(heads // kv_heads))
    split_shape = shape | {"QUERIES": queries, "KEYS": _KEYS_AT_ONCE}
    first = Launch(split_kernel, (rows * kv_heads, splits), arguments, split_shape, stages=2)
    combined, sum_shape = partial | {"counter": counter, "y": y}, shape | {"SPLITS": triton.next_power_of_2(splits)}
    return (first, Launch(combine_kernel, (rows * heads,), combined, sum_shape)), y


def splits_of(pairs: int, room: int) -> int:
    """Choose into how many splits, 1 to 64, to divide the keys. All steps over a cache get the same number, as CUDA
    graphs need it.

    Args:
        pairs: number of key/value heads, times the number of rows rounded up to a power of two, as in a CUDA graph.
        room: number of positions of the cache.
    """
    return splits_for(pairs, min(_MAX_SPLITS, -(-room // (2 * _KEYS_AT_ONCE))))


attend = operator(
    "attend(Tensor q, Tensor keys, Tensor values, Tensor lengths, float scale, Tensor? mask=None,"
    " Tensor(a!)? counter=None, int window=0) -> Tensor",
    attention_launches,
)
