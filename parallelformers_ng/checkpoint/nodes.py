"""How each tensor follows from the tensors that are stored: a small expression per tensor (`reading` evaluates it)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.sharding.plan import Shard


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
        """The whole of it, as a view of mapped memory where that can be."""

    def release(self) -> None:
        """Let go of the pages that were mapped to read it; reading it again maps them again."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is a view of what is stored rather than a copy."""
        return False


@dataclass(eq=False)
class Operation(Node):
    """The result of a tensor operation.

    Attributes:
        name: the operation with its overload, as `str` prints it: "aten.cat.default".
        args, kwargs: its arguments; nodes stand for tensors.
        output: which of its results this is, None where it has one.
    """

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any] = field(default_factory=dict)
    output: int | None = None


@dataclass(eq=False)
class Assembled(Node):
    """A tensor of which ranks hold shards.

    Attributes:
        parts: rank → its shard and where that is stored. Ranks that hold zeros instead of values are left out.
    """

    parts: dict[int, tuple[Shard, Node]]


def leaves(node: Node) -> Iterator[Leaf]:
    """Everything stored that a node is made of."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Assembled):
        for _, source in node.parts.values():
            yield from leaves(source)
    else:
        assert isinstance(node, Operation)
        for operand in operands((node.args, node.kwargs)):
            yield from leaves(operand)


def release(node: Node) -> None:
    """Let go of the pages that were mapped to read a tensor."""
    for leaf in leaves(node):
        leaf.release()


def replace(value: Any, by: Callable[[Node], torch.Tensor]) -> Any:
    """A structure of arguments with every node in it replaced."""
    if isinstance(value, Node):
        return by(value)
    if isinstance(value, (list, tuple)):
        return type(value)(replace(item, by) for item in value)
    if isinstance(value, dict):
        return {key: replace(item, by) for key, item in value.items()}
    return value


def operands(value: Any) -> Iterator[Node]:
    """Every node in a structure of arguments."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands(item)
    elif isinstance(value, dict):
        yield from operands(list(value.values()))
