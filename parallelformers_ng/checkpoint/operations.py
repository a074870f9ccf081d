"""Finds which part of an operation's operands to read for a part of its result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from parallelformers_ng.checkpoint.nodes import Node, Operation
from parallelformers_ng.sharding.partition import Range

Cut = dict[int, tuple[Range, ...]]
"""A wanted part of a tensor: dimension → ranges along it, joined in order. A dimension without ranges is wanted
whole."""

Place = dict[int, Range]
"""Where to write in a tensor: dimension → range along it."""

View = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns another view of a tensor."""


def at(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a view of the part of a tensor at `place`."""
    for dim, (start, stop) in place.items():
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class OperandPart(NamedTuple):
    """The part of an operand that a part of the result is computed from.

    Attributes:
        source: the operand.
        cut: part of the operand to read.
        then: function that turns the part of the operand into the part of the result.
    """

    source: Node
    cut: Cut
    then: View = _unchanged


# -- operations with one operand, for cuts with one range per dimension --------------------------------------------


def _same(node: Operation, cut: Cut) -> OperandPart:
    return OperandPart(node.args[0], cut)


def _cast(node: Operation, cut: Cut) -> OperandPart:
    return OperandPart(node.args[0], cut, lambda part: part.to(node.dtype))


def _transpose(node: Operation, cut: Cut) -> OperandPart:
    source, *dims = node.args
    first, second = (dim % len(node.shape) for dim in (dims or (0, 1)))
    swap = {first: second, second: first}
    below = {swap.get(dim, dim): ranges for dim, ranges in cut.items()}
    return OperandPart(source, below, lambda part: part.transpose(first, second))


def _permute(node: Operation, cut: Cut) -> OperandPart:
    source, dims = node.args
    return OperandPart(source, {dims[dim] % len(dims): cut[dim] for dim in cut}, lambda part: part.permute(dims))


def _stretch(source: Node, dim: int, start: int, stop: int, cut: Cut) -> OperandPart:
    """Return the part of `source` that is the part `cut` of `source[start:stop]`, sliced along `dim`."""
    ((first, last),) = cut.get(dim, ((0, stop - start),))
    return OperandPart(source, {**cut, dim: ((start + first, start + last),)})


def _slice(node: Operation, cut: Cut) -> OperandPart | None:
    source, dim, start, _, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])  # type: ignore[misc]
    if step != 1:
        return None
    dim %= len(node.shape)
    start = start or 0
    start = min(start if start >= 0 else start + source.shape[dim], source.shape[dim])
    return _stretch(source, dim, start, start + node.shape[dim], cut)


def _split(node: Operation, cut: Cut) -> OperandPart:
    source, sizes, dim = (*node.args, *(None, None, 0)[len(node.args) :])  # type: ignore[misc]
    assert node.output is not None
    dim %= len(node.shape)
    start = sizes * node.output if isinstance(sizes, int) else sum(sizes[: node.output])
    return _stretch(source, dim, start, start + node.shape[dim], cut)


def _select(node: Operation, cut: Cut) -> OperandPart:
    source, dim, index = node.args
    return _pick(source, dim % len(source.shape), index, cut)


def _unbind(node: Operation, cut: Cut) -> OperandPart:
    source, dim = (*node.args, *(None, 0)[len(node.args) :])  # type: ignore[misc]
    assert node.output is not None
    return _pick(source, dim % len(source.shape), node.output, cut)


def _pick(source: Node, dim: int, index: int, cut: Cut) -> OperandPart:
    """Return the part of `source` that is the part `cut` of `source[…, index, …]`, selected along `dim`."""
    index %= source.shape[dim]
    above = {other + (other >= dim): ranges for other, ranges in cut.items()}
    return OperandPart(source, {**above, dim: ((index, index + 1),)}, lambda part: part.squeeze(dim))


def _squeeze(node: Operation, cut: Cut) -> OperandPart:
    source, dim = node.args
    dim %= len(source.shape)
    return _pick(source, dim, 0, cut) if source.shape[dim] == 1 else OperandPart(source, cut)


def _unsqueeze(node: Operation, cut: Cut) -> OperandPart:
    source, dim = node.args
    dim %= len(node.shape)
    below = {other - (other > dim): ranges for other, ranges in cut.items() if other != dim}
    return OperandPart(source, below, lambda part: part.unsqueeze(dim))


TRANSPARENT: dict[str, Callable[[Operation, Cut], OperandPart | None]] = {
    "aten.alias.default": _same,
    "aten.detach.default": _same,
    "aten.clone.default": _same,
    "aten._to_copy.default": _cast,
    "aten.t.default": _transpose,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.select.int": _select,
    "aten.unbind.int": _unbind,
    "aten.squeeze.dim": _squeeze,
    "aten.unsqueeze.default": _unsqueeze,
}
"""Name of an operation → function that returns the part of the operand to read for a cut of the result. The cut has
one range per dimension. The function returns None if the operation must run on the whole operand."""

# -- operations that join tensors: any cut of the result is divided over the operands ------------------------------

Piece = tuple[Node, View, Cut]
"""An operand, a function that returns its place in the result, and the part of the operand to read."""


def _cat(node: Operation, cut: Cut) -> Iterator[Piece]:
    sources, dim = (*node.args, *(None, 0)[len(node.args) :])  # type: ignore[misc]
    dim %= len(node.shape)
    rest = {other: ranges for other, ranges in cut.items() if other != dim}
    offset = 0
    for start, stop in cut.get(dim, ((0, node.shape[dim]),)):
        first = 0
        for source in sources:
            last = first + source.shape[dim]
            low, high = max(start, first), min(stop, last)
            if low < high:
                place = {dim: (offset, offset + high - low)}
                yield source, functools.partial(at, place=place), {**rest, dim: ((low - first, high - first),)}
                offset += high - low
            first = last


def _stack(node: Operation, cut: Cut) -> Iterator[Piece]:
    sources, dim = (*node.args, *(None, 0)[len(node.args) :])  # type: ignore[misc]
    dim %= len(node.shape)
    below = {other - (other > dim): ranges for other, ranges in cut.items() if other != dim}
    wanted = [index for start, stop in cut.get(dim, ((0, len(sources)),)) for index in range(start, stop)]
    for offset, index in enumerate(wanted):
        yield sources[index], functools.partial(torch.select, dim=dim, index=offset), below


JOINS: dict[str, Callable[[Operation, Cut], Iterator[Piece]]] = {"aten.cat.default": _cat, "aten.stack.default": _stack}
