"""Nodes of the expression that computes a tensor from stored tensors. The module `reading` evaluates expressions."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parallelformers_ng.sharding.partition import Range, width_of
from parallelformers_ng.sharding.tensor_plan import Shard, TensorPlan

_ELEMENTS = 1 << 21  # limits the memory of dequantization, which runs on so many elements at a time


@dataclass(eq=False)
class Node:
    """A lazy tensor expression: a stored tensor, or an operation on other nodes. `reading.read` evaluates it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Leaf(Node, ABC):
    """A tensor in a file, in memory or on a worker: a node without operands."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """Return the whole tensor, as a view of mapped memory if possible."""

    def release(self) -> None:
        """Free the memory of this tensor if it is in a mapped file. A later read reads the file again."""


@dataclass(eq=False)
class FetchedLeaf(Leaf):
    """A tensor that every read gets by calling `fetch`. Error messages show `name`."""

    fetch: Callable[[], torch.Tensor] = field(repr=False)
    name: str = ""

    def tensor(self) -> torch.Tensor:
        return self.fetch()


@dataclass(eq=False)
class Operation(Node):
    """The result of a torch operation on other nodes.

    Attributes:
        name: name of the torch operation with its overload, for example "aten.cat.default".
        output: index of this tensor in the results of the operation; None if the operation has a single result.
    """

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: int | None = None


@dataclass(eq=False)
class ShardedNode(Node):
    """A tensor that is stored as the shards of several ranks.

    Attributes:
        parts: rank → (position of its shard in the tensor, node of the shard); no entry for a shard of zeros.
    """

    parts: dict[int, tuple[Shard, Node]]


@dataclass(eq=False)
class Computed(Node, ABC):
    """A tensor of which any part can be computed from parts of other nodes, for example by dequantization."""

    @property
    def sources(self) -> list[Node]:
        return [each for each in tree_leaves(list(vars(self).values())) if isinstance(each, Node)]

    @abstractmethod
    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> torch.Tensor:
        """Compute a part of this tensor, in its data type.

        Args:
            cut: dimension → wanted ranges along that dimension; the result joins the ranges. Dimensions that are not in
                `cut` are wanted whole.
            rank: rank whose shard to read if several ranks stored the same part; None for any rank.
        """


class ByLines(Computed):
    """A tensor that is computed in chunks along the dimension `across`, to limit memory.

    A chunk reads at most about 2²¹ elements of a source, but at least one index of the dimension.
    """

    across = 0

    @abstractmethod
    def lines(self, cut: dict[int, tuple[Range, ...]], rank: int | None) -> torch.Tensor:
        """Compute the part `cut` of this tensor; `cut` has one range along the dimension `across`.

        The result may have a more precise data type than this tensor.
        """

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> torch.Tensor:
        dim = self.across
        shape = [width_of(cut.get(index, ((0, size),))) for index, size in enumerate(self.shape)]
        out = torch.empty(shape, dtype=self.dtype)
        elements = max(math.prod(source.shape) for source in self.sources)
        most = max(1, _ELEMENTS * self.shape[dim] // max(1, elements))
        offset = 0
        for first, last in cut.get(dim, ((0, self.shape[dim]),)):
            for start in range(first, last, most):
                stop = min(last, start + most)
                out.narrow(dim, offset, stop - start).copy_(self.lines({**cut, dim: ((start, stop),)}, rank))
                offset += stop - start
        return out


def leaf_of(tensor: torch.Tensor) -> FetchedLeaf:
    return FetchedLeaf(tuple(tensor.shape), tensor.dtype, tensor.detach)


def of_ranks(tensor: TensorPlan, part: Callable[[int], torch.Tensor]) -> ShardedNode:
    """Return a node for a tensor whose shards are on the ranks. To read a shard, the node calls `part(rank)`.

    A replicated tensor is read from rank 0. Shards that are all zeros are not read.
    """
    ranks = [0] if tensor.is_replicated else [rank for rank, shard in enumerate(tensor.shards) if not shard.zero]
    parts: dict[int, tuple[Shard, Node]] = {}
    for rank in ranks:
        shard = tensor.shards[rank]
        leaf = FetchedLeaf(shard.shape(tensor.shape), tensor.dtype, functools.partial(part, rank), tensor.name)
        parts[rank] = shard, leaf
    return ShardedNode(tensor.shape, tensor.dtype, parts)


def parts(node: Node) -> Iterator[Node]:
    """Yield a node and, recursively, the operands of every `Operation`.

    An operand of several operations is yielded several times. The recursion does not descend into a `ShardedNode` or a
    `Computed` node.
    """
    yield node
    if isinstance(node, Operation):
        for operand in tree_leaves((node.args, node.kwargs)):
            if isinstance(operand, Node):
                yield from parts(operand)


def leaves(node: Node, computed: bool = True) -> Iterator[Leaf]:
    """Yield the stored tensors from which a node is computed.

    Args:
        computed: whether to include the sources of `Computed` nodes, for example quantized numbers and scales.
    """
    for part in parts(node):
        if isinstance(part, Leaf):
            yield part
        elif isinstance(part, ShardedNode):
            for _, source in part.parts.values():
                yield from leaves(source, computed)
        elif isinstance(part, Computed) and computed:
            for source in part.sources:
                yield from leaves(source)


def release(node: Node) -> None:
    for leaf in leaves(node):
        leaf.release()
