"""Cuts: which part of a tensor is wanted, along which dimensions, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.plan import Shard

Cut = dict[int, tuple[Range, ...]]
"""Dimension → the ranges wanted along it, side by side. A dimension that is not named is wanted whole."""

Place = dict[int, Range]
"""Dimension → where along it something goes."""


def significant(cut: Cut, shape: Sequence[int]) -> Cut:
    """The same cut of a tensor of `shape`, without the dimensions that it takes whole."""
    return {dim: ranges for dim, ranges in cut.items() if ranges != ((0, shape[dim]),)}


def shape_of(cut: Cut, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of what is cut out of a tensor of `shape`."""
    widths = {dim: sum(stop - start for start, stop in ranges) for dim, ranges in cut.items()}
    return tuple(widths.get(dim, size) for dim, size in enumerate(shape))


def at(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """A view of one place in a tensor."""
    for dim, (start, stop) in place.items():
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def is_single(cut: Cut) -> bool:
    """Whether it takes one range of every dimension, so that it can be a view."""
    return all(len(ranges) == 1 for ranges in cut.values())


def narrow(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Cut a tensor that is in memory: a view where the cut is single."""
    for dim, ranges in cut.items():
        tensor = Shard(dim, ranges).of(tensor)
    return tensor


def singles(cut: Cut) -> Iterator[tuple[Place, Cut]]:
    """Split a cut into single ones, each with its place in the result."""
    if not cut:
        yield {}, {}
        return
    dim = next(iter(cut))
    rest = {other: ranges for other, ranges in cut.items() if other != dim}
    offset = 0
    for start, stop in cut[dim]:
        for place, single in singles(rest):
            yield {dim: (offset, offset + stop - start), **place}, {dim: ((start, stop),), **single}
        offset += stop - start
