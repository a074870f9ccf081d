"""Weights as libraries store them, in high precision again: each part of one from the parts that it takes.

w = (q − z) · s + c        q: numbers of a few bits, z and s: one for each block of them, c: a constant
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelformers_ng.checkpoint.nodes import Computed, Node
from parallelformers_ng.checkpoint.operations import Cut
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.sharding.partition import Range, width_of

_NUMBERS = 1 << 21
"""Numbers of a weight that are computed at a time."""

Blocks = int | Tensor
"""Which block numbers along one dimension belong to: so many in a row to each, or of each number the block."""


@dataclass(eq=False)
class ByLines(Computed):
    """A tensor that is computed some lines of its first dimension at a time."""

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        shape = [width_of(cut.get(dim, ((0, size),))) for dim, size in enumerate(self.shape)]
        out = torch.empty(shape, dtype=self.dtype)
        lines = max(1, _NUMBERS * shape[0] // max(1, math.prod(shape)))
        offset = 0
        for start, stop in _pieces(cut.get(0, ((0, self.shape[0]),)), lines):
            out.narrow(0, offset, stop - start).copy_(self.lines({**cut, 0: ((start, stop),)}, rank))
            offset += stop - start
        return out

    @abstractmethod
    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        """Return a part that has one range along the first dimension, in any data type that has its numbers."""


@dataclass(eq=False)
class Scaled(ByLines):
    """Numbers in blocks.

    Attributes:
        values: q.
        scales: s, as many along each dimension as there are blocks.
        blocks: for each dimension.
        zeros: z, as many as scales; None for 0.
        offset: c.
    """

    values: Node
    scales: Node
    blocks: tuple[Blocks, ...]
    zeros: Node | None = None
    offset: float = 0.0

    @property
    def sources(self) -> Sequence[Node]:
        return (self.values, self.scales, *([] if self.zeros is None else [self.zeros]))

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        numbers = read(self.values, cut, rank).float()
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros, cut, rank)
        numbers = numbers * self._spread(self.scales, cut, rank)
        return numbers + self.offset if self.offset else numbers

    def _spread(self, node: Node, cut: Cut, rank: int | None) -> Tensor:
        """Return the shared figure for each number of a cut; one if all share one."""
        below: Cut = {}
        taken: list[tuple[int, Tensor]] = []
        for dim, (size, block) in enumerate(zip(self.shape, self.blocks, strict=True)):
            ranges = cut.get(dim, ((0, size),))
            if isinstance(block, int) and block == 1:
                below[dim] = ranges
            elif node.shape[dim] > 1 and width_of(ranges):
                numbers = torch.cat([torch.arange(start, stop) for start, stop in ranges])
                group = numbers // block if isinstance(block, int) else block[numbers]
                first = int(group.min())
                below[dim] = ((first, int(group.max()) + 1),)
                taken.append((dim, group - first))
        part = read(node, below, rank).float()
        for dim, index in taken:
            part = part.index_select(dim, index)
        return part


@dataclass(eq=False)
class Flat(ByLines):
    """A matrix whose numbers lie one after another, row by row.

    Attributes:
        numbers: them, in one dimension.
    """

    numbers: Node

    @property
    def sources(self) -> Sequence[Node]:
        return (self.numbers,)

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        ((start, stop),) = cut[0]
        width = self.shape[1]
        rows = read(self.numbers, {0: ((start * width, stop * width),)}, rank).unflatten(0, (stop - start, width))
        return rows if 1 not in cut else torch.cat([rows[:, first:last] for first, last in cut[1]], 1)


@dataclass(eq=False)
class Unpacked(Computed):
    """Numbers that lie in words, several in each, side by side along one dimension.

    Attributes:
        words: stored words.
        bits: bits of a number.
        dim: along which words hold several.
        places: positions of the numbers within a word, lowest bits first.
        table: value of each number; None for the number itself.
    """

    words: Node
    bits: int
    dim: int
    places: tuple[int, ...]
    table: Tensor | None = None

    @property
    def sources(self) -> Sequence[Node]:
        return (self.words,)

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        each, pieces = len(self.places), []
        shifts = torch.tensor(self.places) * self.bits
        for start, stop in cut.get(self.dim, ((0, self.shape[self.dim]),)):
            first = start // each
            words = read(self.words, {**cut, self.dim: ((first, -(-stop // each)),)}, rank).int()
            numbers = torch.stack([words >> int(shift) for shift in shifts], self.dim + 1).flatten(
                self.dim, self.dim + 1
            )
            pieces.append(numbers.narrow(self.dim, start - first * each, stop - start))
        numbers = torch.cat(pieces, self.dim) & ((1 << self.bits) - 1)
        return numbers.to(self.dtype) if self.table is None else self.table[numbers]


@dataclass(eq=False)
class Pairs(ByLines):
    """Integers from -8 to 7, two in a byte along one dimension, as `Encoding` has them.

    Attributes:
        values: them.
        dim: along which they lie in pairs.
        name: name of the weight, for errors.
    """

    values: Node
    dim: int
    name: str

    @property
    def sources(self) -> Sequence[Node]:
        return (self.values,)

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        wanted = cut.get(self.dim)
        wide = cut if wanted is None else {**cut, self.dim: tuple((2 * start, 2 * stop) for start, stop in wanted)}
        values = read(self.values, wide, rank).to(torch.int8)
        if values.numel() and not -8 <= int(values.min()) <= int(values.max()) <= 7:
            raise CheckpointError(
                f"{self.name} is damaged: it has {int(values.min())} to {int(values.max())}, more than 4 bits hold"
            )
        first, second = values.unflatten(self.dim, (-1, 2)).unbind(self.dim + 1)
        return (first & 15 | second << 4).view(torch.uint8)


@dataclass(eq=False)
class Repeated(Computed):
    """A tensor whose lines along one dimension are each there several times.

    Attributes:
        each: them.
        dim: the dimension of the groups.
        times: how often; the last ones less often where `shape` says so.
    """

    each: Node
    dim: int
    times: int

    @property
    def sources(self) -> Sequence[Node]:
        return (self.each,)

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        ranges = cut.get(self.dim, ((0, self.shape[self.dim]),))
        indices = torch.cat([torch.arange(start, stop) for start, stop in ranges]) // self.times
        rest = {dim: taken for dim, taken in cut.items() if dim != self.dim}
        return read(self.each, rest, rank).index_select(self.dim, indices)


def in_order(words: torch.dtype, bits: int) -> tuple[int, ...]:
    """Return the positions of numbers in a word, the first in the lowest bits."""
    return tuple(range(words.itemsize * 8 // bits))


def _pieces(ranges: Sequence[Range], most: int) -> Iterator[Range]:
    for start, stop in ranges:
        for first in range(start, stop, most):
            yield first, min(stop, first + most)
