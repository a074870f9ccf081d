"""Finds which part of an operation's operands to read for a part of its result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from parallelformers_ng.checkpoint.nodes import Node, Operation
from parallelformers_ng.sharding.partition import Range, width_of

# A wanted part of a tensor: dimension → ranges along it, joined in order. A dimension without ranges is wanted whole.
Cut = dict[int, tuple[Range, ...]]

View = Callable[[torch.Tensor], torch.Tensor]  # function that returns another view of a tensor


def run(node: Operation, operand: Callable[[Node], torch.Tensor]) -> torch.Tensor:
    """Run an operation on whole operands, and return the whole result."""
    args, kwargs = tree_map_only(Node, operand, (node.args, node.kwargs))
    operation: Any = functools.reduce(getattr, node.name.split("."), torch.ops)
    result = operation(*args, **kwargs)
    return result if node.output is None else result[node.output]


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# An operand, a function on views, and the part of the operand to read. For an operation with one operand, the function
# turns the part of the operand into the part of the result. For an operation that joins tensors, the function returns
# the operand's place in the result.
Piece = tuple[Node, View, Cut]

# -- operations with one operand, for cuts with one range per dimension --------------------------------------------


def _cast(node: Operation, cut: Cut) -> Piece:
    return node.args[0], lambda part: part.to(node.dtype), cut


def _view(node: Operation, cut: Cut) -> Piece | None:
    """Return the part of the operand of a view that selects, cuts or reorders dimensions; None for an empty part.

    The operation runs on an operand without memory whose dimensions have unlike strides. So the strides and the offset
    of the result say which dimensions of the operand the result shows, and from where on. None is also returned for a
    view that leaves out indices at regular distances.
    """
    source = node.args[0]
    widths = [width_of(cut.get(dim, ((0, size),))) for dim, size in enumerate(node.shape)]
    if 0 in widths:
        return None
    strides = [math.prod(size + 1 for size in source.shape[dim + 1 :]) for dim in range(len(source.shape))]
    result = run(node, lambda _: torch.empty_strided(source.shape, strides, device="meta"))
    starts, offset = [], result.storage_offset()
    for stride in strides:
        starts.append(offset // stride)
        offset %= stride
    below: Cut = {dim: ((start, start + 1),) for dim, start in enumerate(starts)}
    shown = []
    for dim, size in enumerate(result.shape):
        if size > 1:
            if result.stride(dim) not in strides:
                return None
            of_source = strides.index(result.stride(dim))
            ((first, last),) = cut.get(dim, ((0, size),))
            below[of_source] = ((starts[of_source] + first, starts[of_source] + last),)
            shown.append(of_source)
    order = [*shown, *(dim for dim in below if dim not in shown)]
    return source, lambda part: part.permute(order).reshape(widths), below


# Name of an operation → function that returns the part of the operand to read for a cut of the result. The cut has one
# range per dimension. The function returns None if the operation must run on the whole operand.
TRANSPARENT: dict[str, Callable[[Operation, Cut], Piece | None]] = {
    "aten._to_copy.default": _cast,
    "aten.t.default": _view,
    "aten.transpose.int": _view,
    "aten.permute.default": _view,
    "aten.slice.Tensor": _view,
    "aten.split.Tensor": _view,
    "aten.split_with_sizes.default": _view,
    "aten.select.int": _view,
    "aten.unbind.int": _view,
    "aten.squeeze.dim": _view,
    "aten.unsqueeze.default": _view,
}

# -- operations that join tensors: any cut of the result is divided over the operands ------------------------------


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
                view = functools.partial(torch.narrow, dim=dim, start=offset, length=high - low)
                yield source, view, {**rest, dim: ((low - first, high - first),)}
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
