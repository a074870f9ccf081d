"""Quantized weights as expressions: integers and scales of a weight that is read, and the weight of those that are.

A rank asks for its slice of integers and scales. What they are made of is read in rows that are whole, a few at a time:
a scale is that of the whole row, on whichever ranks its parts will be, and nobody holds more of the weight.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallelformers_ng.checkpoint.nodes import Computed, FetchedLeaf, Node, Operation
from parallelformers_ng.checkpoint.operations import Cut
from parallelformers_ng.checkpoint.reading import is_read_in_parts, read, read_copy
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.partition import Range, width_of
from parallelformers_ng.sharding.plan import Shard, ShardPlan, TensorPlan

_NUMBERS = 1 << 21
"""Numbers of a weight that are in high precision at a time."""


@dataclass(eq=False)
class Decoded(Computed):
    """A weight that is stored as integers and scales."""

    encoding: Encoding
    parts: tuple[Node, Node]

    @property
    def sources(self) -> Sequence[Node]:
        return self.parts

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        integers, scales = self.parts
        dim = self.encoding.dim % len(self.shape)
        scale = read(scales, {other: ranges for other, ranges in cut.items() if other != dim}, rank)
        if dim in cut and scale.shape[dim] > 1:
            held = [number // self.encoding.block for start, stop in cut[dim] for number in range(start, stop)]
            scale = scale.index_select(dim, torch.tensor(held))
        return self.encoding.decode(read(integers, dict(cut), rank), scale, self.dtype)


Taken = Callable[[Tensor], Tensor]
"""Cuts a tensor along the dimension of which some lines were computed whole."""


class InLines(Computed):
    """A tensor that is computed some lines at a time, each of them whole.

    Attributes:
        along: the dimension of a line, from the last one.
    """

    along: int = -1

    @property
    def numbers(self) -> int:
        """How many numbers there are in high precision while all lines are computed."""
        return math.prod(self.shape)

    @abstractmethod
    def computing(self, rank: int | None) -> Callable[[Cut, Taken], Tensor]:
        """What computes the lines that a cut takes, and takes of them what is wanted.

        Args:
            rank: whose shards to prefer where several ranks stored the same.
        """

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        dim = self.along % len(self.shape)
        other = next(index for index in range(len(self.shape)) if index != dim)
        shape = [width_of(cut.get(index, ((0, size),))) for index, size in enumerate(self.shape)]
        out = torch.empty(shape, dtype=self.dtype)
        lines, compute = max(1, _NUMBERS * self.shape[other] // max(1, self.numbers)), self.computing(rank)
        rest = {index: ranges for index, ranges in cut.items() if index not in (dim, other)}
        taken: Taken = Shard(dim, cut[dim]).of if dim in cut else _all
        offset = 0
        for start, stop in _pieces(cut.get(other, ((0, self.shape[other]),)), lines):
            out.narrow(other, offset, stop - start).copy_(compute({**rest, other: ((start, stop),)}, taken))
            offset += stop - start
        return out


@dataclass(eq=False)
class _Encoding(InLines):
    """The integers or the scales of a weight."""

    encoding: Encoding
    weight: Node

    @property
    def sources(self) -> Sequence[Node]:
        return (self.weight,)

    @property
    def along(self) -> int:  # type: ignore[override]
        return self.encoding.dim

    @property
    def numbers(self) -> int:
        return math.prod(self.weight.shape)

    def computing(self, rank: int | None) -> Callable[[Cut, Taken], Tensor]:
        weight = self.weight
        if not is_read_in_parts(weight):
            whole = read(weight, {}, rank)
            weight = FetchedLeaf(weight.shape, weight.dtype, lambda: whole)
        return lambda cut, taken: self._of(read_copy(weight, cut, rank), taken)

    @abstractmethod
    def _of(self, numbers: Tensor, taken: Taken) -> Tensor:
        """What is wanted of some lines of the weight."""


class Integers(_Encoding):
    """The integers of a weight."""

    def _of(self, numbers: Tensor, taken: Taken) -> Tensor:
        scales = self.encoding.spread(self.encoding.scales(numbers), numbers.shape)
        one_for_all = scales.shape != numbers.shape
        return self.encoding.integers(taken(numbers), scales if one_for_all else taken(scales))


class Scales(_Encoding):
    """The scales of a weight."""

    def _of(self, numbers: Tensor, taken: Taken) -> Tensor:
        return taken(self.encoding.scales(numbers))


def held_nodes(plan: ShardPlan, name: str, node: Node) -> dict[str, Node]:
    """What ranks hold of a tensor, each by its name, given how to read the tensor."""
    encoding = plan.quantized.get(name)
    if encoding is None:
        return {name: node}
    integers, scales = plan.parts(name)
    stored = stored_encoding(node)
    if stored is not None and stored.encoding == encoding:
        return dict(zip((integers.name, scales.name), stored.parts, strict=True))
    if node.dtype != plan.tensors[name].dtype:
        dtype = plan.tensors[name].dtype
        node = Operation(node.shape, dtype, "aten._to_copy.default", (node,), {"dtype": dtype})
    return {
        integers.name: Integers(integers.shape, integers.dtype, encoding, node),
        scales.name: Scales(scales.shape, scales.dtype, encoding, node),
    }


def stored_encoding(node: Node) -> Decoded | None:
    """What a weight is stored as that is quantized already, whatever its data type is to be; None for another."""
    while isinstance(node, Operation) and node.name == "aten._to_copy.default":
        node = node.args[0]
    return node if isinstance(node, Decoded) else None


def whole_node(plan: ShardPlan, tensor: TensorPlan, held: Callable[[TensorPlan], Node]) -> Node:
    """A tensor, given how to read what the ranks hold of it."""
    parts = plan.parts(tensor.name)
    if len(parts) == 1:
        return held(parts[0])
    integers, scales = map(held, parts)
    return Decoded(tensor.shape, tensor.dtype, plan.quantized[tensor.name], (integers, scales))


def _pieces(ranges: Sequence[Range], most: int) -> Iterator[Range]:
    for start, stop in ranges:
        for first in range(start, stop, most):
            yield first, min(stop, first + most)


def _all(tensor: Tensor) -> Tensor:
    return tensor
