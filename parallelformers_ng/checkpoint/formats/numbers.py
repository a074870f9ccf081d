"""Nodes that compute parts of weights in high precision from the quantized numbers of other libraries.

w = (q − z) · s + c        q: numbers of a few bits, z and s: zero point and scale of a block, c: a constant
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelformers_ng.checkpoint.nodes import ByLines, Computed, Node
from parallelformers_ng.checkpoint.reading import Cut, read
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.sharding.partition import Range, width_of

# Quantization blocks along one dimension: their size, or a tensor with the block number of each index.
Blocks = int | Tensor


@dataclass(eq=False)
class Scaled(ByLines):
    """A weight that is dequantized when it is read: w = (values − zeros) · scales + offset, with one scale per block.

    The weight is computed in fp32, and then cast to `dtype`.

    Attributes:
        blocks: for each dimension, the block size, or a tensor with the block number of each index.
    """

    values: Node
    scales: Node
    blocks: tuple[Blocks, ...]
    zeros: Node | None = None
    offset: float = 0.0

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        numbers = read(self.values, cut, rank).float()
        if self.zeros is not None:
            numbers = numbers - self._spread(self.zeros, cut, rank)
        numbers = numbers * self._spread(self.scales, cut, rank)
        return numbers + self.offset if self.offset else numbers

    def _spread(self, node: Node, cut: Cut, rank: int | None) -> Tensor:
        """Read the scales or zero points `node` for the part `cut` of the weight, in a shape that broadcasts to it."""
        below: Cut = {}
        block_indices: list[tuple[int, Tensor]] = []
        for dim, (size, block) in enumerate(zip(self.shape, self.blocks, strict=True)):
            ranges = cut.get(dim, ((0, size),))
            if isinstance(block, int) and block == 1:
                below[dim] = ranges
            elif node.shape[dim] > 1 and width_of(ranges):
                numbers = torch.cat([torch.arange(start, stop) for start, stop in ranges])
                group = numbers // block if isinstance(block, int) else block[numbers]
                first = int(group.min())
                below[dim] = ((first, int(group.max()) + 1),)
                block_indices.append((dim, group - first))
        part = read(node, below, rank).float()
        for dim, index in block_indices:
            part = part.index_select(dim, index)
        return part


@dataclass(eq=False)
class Flat(ByLines):
    """A matrix whose elements, `numbers`, are stored as a vector, row by row."""

    numbers: Node

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        ((start, stop),) = cut[0]
        width = self.shape[1]
        rows = read(self.numbers, {0: ((start * width, stop * width),)}, rank).unflatten(0, (stop - start, width))
        return rows if 1 not in cut else torch.cat([rows[:, first:last] for first, last in cut[1]], 1)


@dataclass(eq=False)
class Unpacked(Computed):
    """Integers of `bits` bits. Each element of `words` packs several integers that are neighbors in dimension `dim`.

    Attributes:
        places: position in a word of each consecutive integer; position 0 is the lowest bits.
        table: value of each code; None if the code is the value.
    """

    words: Node
    bits: int
    dim: int
    places: tuple[int, ...]
    table: Tensor | None = None

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        each, pieces, dim = len(self.places), [], self.dim
        for start, stop in cut.get(dim, ((0, self.shape[dim]),)):
            first = start // each
            words = read(self.words, {**cut, dim: ((first, -(-stop // each)),)}, rank).int()
            numbers = torch.stack([words >> self.bits * place for place in self.places], dim + 1).flatten(dim, dim + 1)
            pieces.append(numbers.narrow(dim, start - first * each, stop - start))
        numbers = torch.cat(pieces, dim) & ((1 << self.bits) - 1)
        return numbers.to(self.dtype) if self.table is None else self.table[numbers]


@dataclass(eq=False)
class Pairs(ByLines):
    """The integers of `values`, packed two in a byte when they are read, in the int4 format of `Encoding`.

    The first integer of a pair is in the lower 4 bits. An integer out of range raises CheckpointError.

    Attributes:
        dim: dimension along which two neighboring integers are packed into one byte.
    """

    values: Node
    dim: int
    name: str

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        wanted = cut.get(self.dim)
        wide = cut if wanted is None else {**cut, self.dim: tuple((2 * start, 2 * stop) for start, stop in wanted)}
        values = read(self.values, wide, rank).to(torch.int8)
        if values.numel() and not -8 <= int(values.min()) <= int(values.max()) <= 7:
            raise CheckpointError(f"{self.name} is damaged: it has values that are not -8 to 7")
        first, second = values.unflatten(self.dim, (-1, 2)).unbind(self.dim + 1)
        return (first & 15 | second << 4).view(torch.uint8)


def in_order(bits: int) -> tuple[int, ...]:
    """Return positions for `Unpacked.places`: consecutive integers fill a word of 32 bits from the lowest bits on."""
    return tuple(range(32 // bits))


def levels(bits: int) -> torch.Tensor:
    """Return a table for `Unpacked.table`, int8: the value of a code of `bits` bits is the code minus 2^(bits − 1).

    Zero points use the same table, so the usual zero point, 2^(bits − 1), becomes 0.
    """
    return (torch.arange(1 << bits) - (1 << bits - 1)).to(torch.int8)
