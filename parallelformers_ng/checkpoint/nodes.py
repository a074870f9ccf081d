"""How each tensor follows from the tensors that are stored: a small expression per tensor (`reading` evaluates it)."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.tensor_plan import Shard, TensorPlan


@dataclass(eq=False)
class Node:
    """A tensor that may not have been read yet.

    Attributes:
        shape: its whole shape.
        dtype: its data type.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Leaf(Node, ABC):
    """A tensor as it is stored."""

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """Return the whole of it, as a view of mapped memory if that can be."""

    def release(self) -> None:
        """Let go of the pages that were mapped to read it; reading it again maps them again."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a view of what is stored rather than a copy."""
        return False


@dataclass(eq=False)
class FetchedLeaf(Leaf):
    """A tensor that is held elsewhere.

    Attributes:
        fetch: gives the whole of it.
        name: for people.
    """

    fetch: Callable[[], torch.Tensor] = field(repr=False)
    name: str = ""

    def tensor(self) -> torch.Tensor:
        return self.fetch()


@dataclass(eq=False)
class Operation(Node):
    """The result of a tensor operation.

    Attributes:
        name: the operation with its overload, as `str` prints it: "aten.cat.default".
        args, kwargs: its arguments; nodes stand for tensors.
        output: index of this result among several, None for a single result.
    """

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: int | None = None


@dataclass(eq=False)
class ShardedNode(Node):
    """A tensor of which ranks hold shards.

    Attributes:
        parts: rank → its shard and where that is stored. Ranks that hold zeros instead of values are left out.
    """

    parts: dict[int, tuple[Shard, Node]]


@dataclass(eq=False)
class Computed(Node, ABC):
    """A tensor; parts of it can be computed from parts of others."""

    @property
    @abstractmethod
    def sources(self) -> Sequence[Node]:
        """The others."""

    @abstractmethod
    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> torch.Tensor:
        """Return a part of it.

        Args:
            cut: ranges to read: dimension → ranges along it, side by side.
            rank: whose shards to prefer where several ranks stored the same.
        """


def of_ranks(tensor: TensorPlan, part: Callable[[int], torch.Tensor]) -> ShardedNode:
    """Return a tensor of which every rank holds its shard.

    Args:
        part: gives the shard of the rank of that number.
    """
    ranks = [0] if tensor.is_replicated else [rank for rank, shard in enumerate(tensor.shards) if not shard.zero]
    parts: dict[int, tuple[Shard, Node]] = {}
    for rank in ranks:
        shard = tensor.shards[rank]
        leaf = FetchedLeaf(shard.shape(tensor.shape), tensor.dtype, functools.partial(part, rank), tensor.name)
        parts[rank] = shard, leaf
    return ShardedNode(tensor.shape, tensor.dtype, parts)


def parts(node: Node) -> Iterator[Node]:
    """Yield a node, and all that operations make it of."""
    yield node
    if isinstance(node, Operation):
        for operand in tree_leaves((node.args, node.kwargs)):
            if isinstance(operand, Node):
                yield from parts(operand)


def leaves(node: Node, computed: bool = True) -> Iterator[Leaf]:
    """Everything stored that a node is made of.

    Args:
        computed: also what stands for other numbers, which are computed from it.
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
    """Let go of the pages that were mapped to read a tensor."""
    for leaf in leaves(node):
        leaf.release()
