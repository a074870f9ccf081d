"""Computes which heads and which columns each rank gets. Uses only sizes, no tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, pairwise, starmap
from typing import Literal

from parallelformers_ng.errors import PolicyError

# A rank whose bytes are over 1.15 times an equal share of the model gets fewer of the columns that are not heads.
_MAX_LOAD = 1.15
# A rank with fewer heads would wait for the other ranks. It gets further columns for 75 % of the waiting time.
_WAIT_FRACTION = 0.75
_MAX_LOAD_BY_RATIO = 1.01  # replaces `_MAX_LOAD` if the caller chose the ranks' fractions, which the bytes must follow

Range = tuple[int, int]  # a half-open interval `[start, stop)` along one dimension
# A layer's width consists of query heads, key/value heads or plain columns. "" means "query" beneath a module with a
# `Heads` rule, and "column" elsewhere.
Unit = Literal["", "query", "key", "column"]


@dataclass(frozen=True)
class Part:
    """One of several projections that a layer packs, if their heads differ in width, as in a state-space mixer.

    Args:
        unit: kind of the heads of this projection, "query" or "key".
        width: columns of one head: a number, or the name of an attribute of the module with the `Heads` rule.
    """

    unit: Unit
    width: int | str


def spread(count: int, world_size: int, shares: Sequence[float] = ()) -> list[Range]:
    """Cut `count` items into consecutive ranges, one for each rank, as close to the fractions `shares` as possible.

    Fractions have the sum 1, and are equal if `shares` is empty: 12 items on 5 ranks become 3, 3, 2, 2, 2. Each rank
    gets at least one item; if there are fewer items than ranks, the last ranks get none.
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
    """Cut columns like `spread`, but do not cut a group of `group` adjacent columns.

    Groups are ignored if the width is no multiple of `group`, or has fewer groups than ranks. Then, with `shares`, each
    range is a multiple of 16, 8, 4 or 2 columns: the first of these that moves no bound by more than 1 % of the width.
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
    """Return whether columns can be divided by whole groups of `group` columns, with a group for every rank."""
    return group > 1 and width % group == 0 and width // group >= world_size


def even_out(loads: Sequence[int], flexible: int, parts: Sequence[float] = ()) -> list[float]:
    """Give ranks with too many bytes fewer of the columns that are not heads.

    A rank has too many bytes if it has more than 1.15 times an equal share, or 1.01 times the fraction in `parts` that
    the caller chose. Below that limit, columns stay equally divided: ranks wait for each other in every layer, so equal
    layers are faster than equal ranks.

    Args:
        loads: bytes of each rank if columns are divided by `parts`.
        flexible: bytes of all columns that are not heads.
        parts: each rank's fraction of the model; empty for equal fractions.

    Returns:
        Each rank's fraction of the `flexible` bytes, at least a tenth of its fraction in `parts`. Empty if no rank has
        too many bytes.
    """
    slack = _MAX_LOAD_BY_RATIO if parts else _MAX_LOAD
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
    """Give ranks with fewer heads more of the columns that are not heads.

    In each layer, a rank with fewer heads waits for the sum of the attentions. While it waits, it prefetches at most
    `ahead` bytes of its columns' weights, so it can multiply more columns in the same time. Measured on two CPU ranks
    of one thread (SmolLM2-135M, 6 and 3 heads, 704 and 832 columns): layers of a decode step take 0.94 of the time.

    Returns:
        Each rank's fraction of the `flexible` bytes, at least half of an equal fraction. Empty if `loads`, the bytes of
        heads of each rank, are equal.
    """
    even, mean = 1 / len(loads), sum(loads) / len(loads)
    if len(set(loads)) == 1 or not flexible:
        return []
    extra = [max(-ahead / 2, min(_WAIT_FRACTION * (mean - load), ahead / 2)) / flexible for load in loads]
    wanted = [max(even / 2, even + part) for part in extra]
    return [share / sum(wanted) for share in wanted]


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank."""

    query: tuple[int, ...]  # indices of the rank's query heads, consecutive
    # Indices of the rank's key/value heads. Each is read by `groups` consecutive query heads. An index may repeat.
    key: tuple[int, ...]
    groups: int  # number of query heads that read one key/value head on this rank
    # Whether there was no head left for this rank. It holds a copy of head 0, so that shapes and cache lengths are
    # right, and zeros as rows of the output projection, so that it adds nothing to the sum.
    idle: bool = False


def share_heads(query_heads: int, key_heads: int, world_size: int, shares: Sequence[float] = ()) -> list[HeadShare]:
    """Give each rank whole query heads, and the key/value heads that the rank's query heads read.

    The query heads that read one key/value head are a group. There are two divisions of query heads: an even division,
    which may cut groups, and a division by whole groups. A rank with a cut group holds a key/value head for each of its
    query heads (`groups` is 1). The division with fewer heads on its largest rank is chosen; the even division if there
    are fewer key/value heads than ranks. For example, 9 query and 3 key/value heads on 2 ranks are divided by groups:
    6 + 3 query and 2 + 1 key/value heads. The even division would have 5 + 4 query and 5 + 4 key/value heads.
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
    """Divide a dimension that packs several `parts` among the ranks; return the ranges of each rank.

    Every part is divided separately: "query" and "key" parts by whole heads, "column" parts like `spread_columns`.
    `head_widths` has, for each part, the columns of one head, or of the whole "column" part. If it is empty, all heads
    are equally wide; if one of the parts is a "column" part, all parts are equally wide.
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
    """Divide a dimension that packs each key/value head with its query heads among the ranks: `q q k v | q q k v | …`.

    `parts` describes one group: "query" stands for all its query heads, "key" for one key head or one value head.
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
    """Split each rank's columns at the borders of groups of `group_width` columns.

    A run is `(start, stop, group, is first)`: start and stop count the rank's own columns, and `is first` says that no
    lower rank holds these columns. With groups of 4 columns, the ranges (2, 6) of rank 0 and (4, 8) of rank 1 become
    (0, 2, 0, True), (2, 4, 1, True) and (0, 2, 1, False), (2, 4, 1, True).
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
