"""Computes which heads or columns of a width each rank gets. Needs no tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise, starmap
from typing import Literal

from parallelformers_ng.errors import PolicyError

# Limit of a rank's bytes, in even shares: above the limit, the rank gets fewer columns that are not heads.
_TOO_MUCH = 1.15
# Share of the time in which a rank waits for ranks with more heads that it computes further columns instead.
_OF_THE_WAIT = 0.75
_OFF_RATIO = 1.01  # limit of a rank's bytes if the caller set a ratio, as a multiple of the rank's part of that ratio

Range = tuple[int, int]  # a half-open interval `[start, stop)` along one dimension
# Unit of a layer's width: query heads, key/value heads or plain columns. "" means "query" beneath a module with a
# `Heads` rule and "column" elsewhere.
Unit = Literal["", "query", "key", "column"]


@dataclass(frozen=True)
class Part:
    """One of several projections packed in one layer whose heads differ in width, as in a state-space mixer.

    Args:
        unit: kind of the heads in this part, "query" or "key".
        width: columns of one head: a number, or the name of an attribute of the module with the `Heads` rule.
    """

    unit: Unit
    width: int | str


def spread(count: int, world_size: int, shares: Sequence[float] = ()) -> list[Range]:
    """Cut `count` items into consecutive ranges, one for each rank, as close to the fractions `shares` as possible.

    Fractions have the sum 1, and are equal if `shares` is empty; then longer ranges come first. Each rank gets at least
    one item if there are enough items; otherwise the first ranks get one item each. 12 items on 5 ranks: 3, 3, 2, 2, 2.
    """
    if shares and count >= world_size:
        bounds = [0]
        for rank in range(1, world_size):
            wanted = round(count * sum(shares[:rank]))
            bounds.append(min(max(wanted, bounds[-1] + 1), count - world_size + rank))
        return list(pairwise([*bounds, count]))
    share, rest = divmod(count, world_size)
    starts = [rank * share + min(rank, rest) for rank in range(world_size + 1)]
    return list(pairwise(starts))


def spread_columns(width: int, world_size: int, shares: Sequence[float] = (), group: int = 1) -> list[Range]:
    """Cut columns like `spread`, but keep groups whole, or align the ranges.

    Groups are ignored if the width is no multiple of `group`, or has fewer groups than ranks. Then ranges by `shares`
    are multiples of 16, 8, 4 or 2 columns, if that divides the width and moves no bound by more than 1 % of it.
    """
    if has_groups(width, world_size, group):
        return spread_aligned(width, world_size, group, shares)
    for granule in (16, 8, 4, 2) if shares else ():
        ranges = spread_aligned(width, world_size, granule, shares)
        wanted = (width * part for part in accumulate(shares))
        if all(abs(stop - place) <= width / 100 for (_, stop), place in zip(ranges, wanted, strict=True)):
            return ranges
    return spread(width, world_size, shares)


def spread_aligned(width: int, world_size: int, granule: int = 8, shares: Sequence[float] = ()) -> list[Range]:
    """Cut columns like `spread`, in multiples of the greatest common divisor of `width` and `granule`.

    Grouped matrix products refuse rows that are not a multiple of 16 bytes, and tensor cores are slower with such rows.
    Eight columns of a 16-bit data type have 16 bytes.
    """
    granule = math.gcd(width, granule)
    return [(start * granule, stop * granule) for start, stop in spread(width // granule, world_size, shares)]


def has_groups(width: int, world_size: int, group: int) -> bool:
    """Return whether a width consists of whole groups of `group` > 1 columns, at least one group for every rank."""
    return group > 1 and width % group == 0 and width // group >= world_size


def even_out(loads: Sequence[int], flexible: int, parts: Sequence[float] = ()) -> list[float]:
    """Divide freely divisible columns so that no rank is far over its limit.

    A rank with more heads gets fewer such columns only if it would hold more than 1.15 even shares. Ranks wait for each
    other in every layer, so even layers are faster than even ranks; see `fill_waits` for an exception. For a ratio that
    the caller set, the limit of a rank is 1.01 times the rank's part.

    Returns:
        Fraction of the `flexible` bytes for each rank, at least a tenth of its fraction in `parts`. Empty if no rank is
        over its limit.
    """
    slack = _OFF_RATIO if parts else _TOO_MUCH
    parts = parts or [1 / len(loads)] * len(loads)
    most = [slack * part * sum(loads) for part in parts]
    if all(load <= limit for load, limit in zip(loads, most, strict=True)) or not flexible:
        return []
    wanted = [
        max(part * flexible / 10, part * flexible - max(0.0, load - limit))
        for part, load, limit in zip(parts, loads, most, strict=True)
    ]
    return [share / sum(wanted) for share in wanted]


def fill_waits(loads: Sequence[int], flexible: int, ahead: int) -> list[float]:
    """Divide freely divisible columns so that ranks with fewer heads have more columns, and wait less.

    In each layer, a rank with fewer heads waits for the sum of the attentions. Meanwhile it prefetches weights of its
    columns, so it multiplies more columns in the same time. Measured on two CPU ranks of one thread (SmolLM2-135M with
    6 and 3 heads, 704 and 832 columns): layers of a decode step in 0.94 of the time.

    Returns:
        Fraction of the `flexible` bytes for each rank, at least half of an even fraction. Empty if all ranks have
        equally many bytes of heads, `loads`. A rank prefetches at most `ahead` bytes.
    """
    even, mean = 1 / len(loads), sum(loads) / len(loads)
    if len(set(loads)) == 1 or not flexible:
        return []
    extra = [max(-ahead / 2, min(_OF_THE_WAIT * (mean - load), ahead / 2)) / flexible for load in loads]
    wanted = [max(even / 2, even + part) for part in extra]
    return [share / sum(wanted) for share in wanted]


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank."""

    query: tuple[int, ...]  # indices of the rank's query heads, consecutive
    # indices of the key/value heads that the query heads read: one for each `groups` query heads. An index may repeat.
    key: tuple[int, ...]
    groups: int  # query heads per key/value head on this rank
    # whether the rank got no head. An idle rank holds a copy of head 0, which keeps shapes and cache lengths right. Its
    # output rows are zero, so that it adds nothing to the sum.
    idle: bool = False


def share_heads(query_heads: int, key_heads: int, world_size: int, shares: Sequence[float] = ()) -> list[HeadShare]:
    """Give each rank whole query heads, and the key/value heads that the rank's query heads read.

    Query heads are divided evenly, or in whole groups: the query heads that read one key/value head are a group. An
    even division may cut groups: with 6 query and 3 key/value heads on 2 ranks, q0 q1 read k0, and q2 reads k1. Such a
    rank holds one key/value head for each query head, and its `groups` is 1. Whole groups would be q0–q3 with k0 k1,
    and q4 q5 with k2. The division with fewer heads on its largest rank is chosen. For example, 9 query and 3 key/value
    heads on 2 ranks become 6 + 3 query heads with 2 + 1 key/value heads, not 5 + 4 query heads with 5 + 4 key/value
    heads. With fewer key/value heads than ranks, the division is even.
    """
    if query_heads < 1 or key_heads < 1 or query_heads % key_heads:
        raise PolicyError(f"{query_heads} query heads cannot share {key_heads} key/value heads evenly")
    readers = query_heads // key_heads
    single = _share_queries(spread(query_heads, world_size, shares), readers)
    if key_heads < world_size:
        return single
    ranges = [(start * readers, stop * readers) for start, stop in spread(key_heads, world_size, shares)]
    parts = shares or [1.0] * world_size

    def fullest(heads: list[HeadShare]) -> float:
        return max((len(mine.query) + len(mine.key)) / part for mine, part in zip(heads, parts, strict=True))

    return min(single, _share_queries(ranges, readers), key=fullest)


def _share_queries(ranges: Sequence[Range], ratio: int) -> list[HeadShare]:
    shares = []
    for start, stop in ranges:
        if start == stop:
            shares.append(HeadShare(query=(0,), key=(0,), groups=1, idle=True))
            continue
        keys = [head // ratio for head in range(start, stop)]
        readers = Counter(keys)
        groups = readers[keys[0]] if len(set(readers.values())) == 1 else 1
        shares.append(HeadShare(tuple(range(start, stop)), tuple(keys[::groups]), groups))
    return shares


def join(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Drop empty ranges and merge neighbours: `(0, 4), (4, 8), (2, 3)` → `(0, 8), (2, 3)`."""
    joined: list[Range] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start != stop:
            joined.append((start, stop))
    return tuple(joined)


def cut_width(
    size: int,
    parts: Sequence[Unit],
    heads: Sequence[HeadShare],
    world_size: int,
    head_widths: Sequence[int] = (),
    shares: Sequence[float] = (),
    group: int = 1,
) -> list[tuple[Range, ...]]:
    """Cut a dimension of `size`, packed from `parts`, for every rank; the ranges are in the order of the parts.

    "query" and "key" parts are cut by whole heads, "column" parts as evenly as possible, as in `spread_columns`.
    `head_widths` has the columns of one head in each part, or of a whole "column" part. It is empty if all heads are
    equally wide, or if all parts are equally wide and one is a "column" part.
    """
    whole = {"query": _total(heads, "query"), "key": _total(heads, "key"), "column": 1}
    if head_widths:
        widths = [head * whole[part] for part, head in zip(parts, head_widths, strict=True)]
        if sum(widths) != size:
            raise PolicyError(f"its parts are {' + '.join(map(str, widths))} wide, not {size}")
    elif heads and "column" not in parts:
        head = _head_width(size, sum(whole[part] for part in parts), len(parts))
        widths = [head * whole[part] for part in parts]
    elif size % len(parts) == 0:
        widths = [size // len(parts)] * len(parts)
    else:
        raise PolicyError(f"its width {size} does not divide into {len(parts)} fused parts")

    per_rank: list[list[Range]] = [[] for _ in range(world_size)]
    offset = 0
    for part, width in zip(parts, widths, strict=True):
        if part == "column":
            for rank, (start, stop) in enumerate(spread_columns(width, world_size, shares, group)):
                per_rank[rank].append((offset + start, offset + stop))
        else:
            if width % whole[part]:
                raise PolicyError(f"a fused part of width {width} is not a multiple of {whole[part]} {part} heads")
            head = width // whole[part]
            for rank, share in enumerate(heads):
                owned = share.query if part == "query" else share.key
                per_rank[rank] += [(offset + index * head, offset + (index + 1) * head) for index in owned]
        offset += width
    return [join(ranges) for ranges in per_rank]


def cut_interleaved(
    size: int, parts: Sequence[Unit], heads: Sequence[HeadShare], head_widths: Sequence[int] = ()
) -> list[tuple[Range, ...]]:
    """Cut a dimension of `size` that packs each key/value head's group in one piece: `q q k v | q q k v | …`.

    In `parts`, "query" means all query heads of the group, "key" one key or value head.
    """
    groups = _total(heads, "key")
    ratio = _total(heads, "query") // groups
    counts = [ratio if part == "query" else 1 for part in parts]
    if not head_widths:
        head_widths = [_head_width(size, sum(counts) * groups, len(parts))] * len(parts)
    elif sum(count * head for count, head in zip(counts, head_widths, strict=True)) * groups != size:
        raise PolicyError(f"its width {size} is not {groups} groups of {counts} heads, {list(head_widths)} wide each")
    per_rank = []
    for share in heads:
        ranges: list[Range] = []
        for index, group in enumerate(share.key):
            start = size // groups * group
            for part, count, head in zip(parts, counts, head_widths, strict=True):
                mine = share.query[index * share.groups : (index + 1) * share.groups] if part == "query" else (0,)
                ranges += [(start + query % ratio * head, start + (query % ratio + 1) * head) for query in mine]
                start += head * count
        per_rank.append(join(ranges))
    return per_rank


def _head_width(size: int, heads: int, parts: int) -> int:
    if size % heads:
        counted = f"its {heads} heads" if parts == 1 else f"{heads}, the heads of its {parts} parts together"
        raise PolicyError(f"a layer has width {size}, which is not a multiple of {counted}")
    return size // heads


def group_runs(per_rank: Sequence[Sequence[Range]], group_width: int) -> list[tuple[tuple[int, int, int, bool], ...]]:
    """Return the columns of each rank in runs, each within one group of `group_width` columns.

    A run is `(start, stop, group, is counted)`; start and stop are positions in the rank's own columns. Only the first
    rank that holds a column counts the column. In groups of 4 columns, the ranges (2, 6) of rank 0 and (4, 8) of rank 1
    become (0, 2, 0, True), (2, 4, 1, True) and (0, 2, 1, False), (2, 4, 1, True).
    """
    seen: set[int] = set()
    by_rank = []
    for ranges in per_rank:
        kinds = []
        for column in chain.from_iterable(starmap(range, ranges)):
            kinds.append((column // group_width, column not in seen))
            seen.add(column)
        runs, start = [], 0
        for kind, same in groupby(kinds):
            stop = start + len(list(same))
            runs.append((start, stop, *kind))
            start = stop
        by_rank.append(tuple(runs))
    return by_rank


def width_of(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _total(heads: Sequence[HeadShare], unit: str) -> int:
    return 1 + max((max(share.query if unit == "query" else share.key) for share in heads), default=0)
