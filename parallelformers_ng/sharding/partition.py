"""Computes which heads or columns of a width each rank gets. Needs no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise, starmap

from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.policy_words import Unit

_TOO_MUCH = 1.15
"""Limit of a rank's bytes, in even shares: above the limit, the rank gets fewer columns that are not heads."""
_OF_THE_WAIT = 0.75
"""Share of the time in which a rank waits for ranks with more heads that it computes further columns instead."""
_OFF_RATIO = 1.01
"""Limit of a rank's bytes if the caller set a ratio, as a multiple of the rank's part of that ratio."""

Range = tuple[int, int]
"""A half-open interval `[start, stop)` along one dimension."""


def spread(count: int, world_size: int, shares: Sequence[float] = ()) -> list[Range]:
    """Cut `count` items into consecutive ranges, one for each rank, as close to the fractions as possible.

    Each rank gets at least one item if there are enough items; otherwise the first ranks get one item each. For equal
    fractions, longer ranges come first.

    Args:
        shares: fraction of the items for each rank, sum 1; empty for equal fractions.

    >>> spread(12, 5)
    [(0, 3), (3, 6), (6, 8), (8, 10), (10, 12)]
    >>> spread(12, 3, (0.02, 0.49, 0.49))
    [(0, 1), (1, 6), (6, 12)]
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

    If `group` is ignored, and `shares` is not empty, ranges are multiples of 16, 8, 4 or 2 columns. Such a multiple
    must divide the width, and must move no bound by more than 1 % of the width.

    Args:
        shares: fraction of the columns for each rank, sum 1; empty for equal fractions.
        group: number of consecutive columns that stay on one rank. Ignored if the width is no multiple of `group`, or
            has fewer groups than ranks.

    >>> spread_columns(960, 3, (0.2, 0.4, 0.4))
    [(0, 192), (192, 576), (576, 960)]
    >>> spread_columns(160, 3, group=32)
    [(0, 64), (64, 128), (128, 160)]
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

    Args:
        loads: bytes on each rank if the freely divisible columns are divided by `parts`.
        flexible: bytes of the freely divisible columns of all ranks.
        parts: fraction of all bytes for each rank, sum 1; empty for equal fractions.

    Returns:
        Fraction of the columns for each rank, sum 1, at least a tenth of the rank's fraction in `parts`. Empty if no
        rank is over its limit, or if `flexible` is 0.
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

    Args:
        loads: bytes of heads on each rank.
        flexible: bytes of the freely divisible columns of all ranks.
        ahead: most bytes that a rank prefetches while it waits, in all layers together.

    Returns:
        Fraction of the columns for each rank, sum 1, at least half of an even fraction. Empty if all ranks have equally
        many heads, or if `flexible` is 0.

    >>> fill_waits([300, 100], 1000, 400)
    [0.425, 0.575]
    """
    even, mean = 1 / len(loads), sum(loads) / len(loads)
    if len(set(loads)) == 1 or not flexible:
        return []
    extra = [max(-ahead / 2, min(_OF_THE_WAIT * (mean - load), ahead / 2)) / flexible for load in loads]
    wanted = [max(even / 2, even + part) for part in extra]
    return [share / sum(wanted) for share in wanted]


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank.

    Attributes:
        query: indices of the rank's query heads, consecutive.
        key: indices of the key/value heads that the query heads read: one for each `groups` query heads. An index may
            repeat.
        groups: query heads per key/value head on this rank.
        idle: whether the rank got no head. An idle rank holds a copy of head 0, which keeps shapes and cache lengths
            right. Its output rows are zero, so that it adds nothing to the sum.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    groups: int
    idle: bool = False


def share_heads(query_heads: int, key_heads: int, world_size: int, shares: Sequence[float] = ()) -> list[HeadShare]:
    """Give each rank whole query heads, and the key/value heads that the rank's query heads read.

    Query heads are divided evenly, or in whole groups: the query heads that read one key/value head are a group. An
    even division may cut groups: with 6 query and 3 key/value heads on 2 ranks, q0 q1 read k0, and q2 reads k1. Such a
    rank holds one key/value head for each query head, and its `groups` is 1. Whole groups would be q0–q3 with k0 k1,
    and q4 q5 with k2. The division with fewer heads on its largest rank is chosen. For example, 9 query and 3 key/value
    heads on 2 ranks become 6 + 3 query heads with 2 + 1 key/value heads, not 5 + 4 query heads with 5 + 4 key/value
    heads. With fewer key/value heads than ranks, the division is even.

    Args:
        query_heads: number of query heads of the attention.
        key_heads: number of key/value heads of the attention.
        world_size: number of ranks.
        shares: fraction of the heads for each rank, sum 1; empty for equal fractions.

    Raises:
        PolicyError: the query heads are not a multiple of the key/value heads, or one of the two numbers is below 1.
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
        query = tuple(range(start, stop))
        readers = [len(list(same)) for _, same in groupby(head // ratio for head in query)]
        if len(set(readers)) == 1:
            key = tuple(range(start // ratio, (stop - 1) // ratio + 1))
            shares.append(HeadShare(query, key, groups=readers[0]))
        else:
            shares.append(HeadShare(query, tuple(head // ratio for head in query), groups=1))
    return shares


def join(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Drop empty ranges and merge neighbours: `(0, 4), (4, 8), (2, 3)` → `(0, 8), (2, 3)`."""
    joined: list[Range] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
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
    """Cut a dimension of `size`, packed from `parts`, for every rank.

    Args:
        size: length of the dimension.
        parts: unit of each packed part: "query" and "key" are cut by whole heads, "column" as evenly as possible.
        heads: heads of each rank in the surrounding attention; empty outside attention.
        world_size: number of ranks.
        head_widths: columns of one head in each part, or of a whole "column" part. Empty if all heads are equally wide;
            with a "column" part, empty if all parts are equally wide.
        shares: fraction of the columns of a "column" part for each rank, as in `spread`.
        group: width of the column groups of a "column" part that are not cut, as in `spread_columns`.

    Returns:
        The ranges of each rank, in the order of the parts.

    Raises:
        PolicyError: the parts do not fit the size.
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

    Args:
        size: length of the dimension.
        parts: parts of one group: "query" means all query heads of the group, "key" one key or value head.
        heads: heads of each rank in the surrounding attention.
        head_widths: columns of one head in each part; empty if all heads are equally wide.

    Returns:
        The ranges of each rank, in order.

    Raises:
        PolicyError: the groups do not fit the size.
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
    """Return the columns of one head if all heads of all packed parts are equally wide."""
    if size % heads:
        counted = f"its {heads} heads" if parts == 1 else f"{heads}, the heads of its {parts} parts together"
        raise PolicyError(f"a layer has width {size}, which is not a multiple of {counted}")
    return size // heads


def group_runs(per_rank: Sequence[Sequence[Range]], group_width: int) -> list[tuple[tuple[int, int, int, bool], ...]]:
    """Return the columns of each rank in runs, each within one group of `group_width` columns.

    Only the first rank that holds a column counts the column. A run has only counted or only uncounted columns.

    Args:
        per_rank: ranges of the columns of each rank.
        group_width: number of columns of a group.

    Returns:
        For each rank, `(start, stop, group, is counted)` for each run; start and stop are positions in the rank's own
        columns.

    >>> group_runs([[(2, 6)], [(4, 8)]], 4)
    [((0, 2, 0, True), (2, 4, 1, True)), ((0, 2, 1, False), (2, 4, 1, True))]
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
    """Return the total number of columns in the ranges."""
    return sum(stop - start for start, stop in ranges)


def _total(heads: Sequence[HeadShare], unit: str) -> int:
    """Return the number of heads of the whole model: the highest index on any rank, plus one."""
    return 1 + max((max(share.query if unit == "query" else share.key) for share in heads), default=0)
