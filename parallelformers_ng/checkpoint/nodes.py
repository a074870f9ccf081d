"""How each tensor follows from the tensors that are stored: a small expression per tensor, and reading a part of it.

A rank needs a slice of a tensor that a checkpoint may hold under another name, in another type, as one of many experts
or as a third of a fused projection. `read` carries the slice down through the operations to the leaves, so that only
the bytes asked for are touched. An operation it does not know is run on its whole operands, and the result is cut.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.plan import Shard

Cut = dict[int, tuple[Range, ...]]
"""Dimension → the ranges wanted along it, side by side. A dimension that is not named is wanted whole."""


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


def read_shard(node: Node, shard: Shard, rank: int | None = None) -> torch.Tensor:
    """One rank's part of a tensor: a view where it is stored so, else a copy, contiguous.

    Args:
        shard: which part.
        rank: whose shards to prefer where several ranks stored the same.
    """
    shape = shard.shape(node.shape)
    if shard.zero or 0 in shape:
        return torch.zeros(shape, dtype=node.dtype)
    cut: Cut = {} if shard.dim is None else {shard.dim: shard.ranges}
    part = read(node, cut, rank)
    if part.is_contiguous():
        if any(leaf.holds(part) for leaf in leaves(node)):
            return part
        release(node)
        return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
    out = torch.empty(shape, dtype=node.dtype)
    write(node, cut, out, rank)
    return out


def read(node: Node, cut: Cut, rank: int | None = None) -> torch.Tensor:
    """Part of a tensor: a view of what is stored where the cut allows, whatever its strides."""
    cut = {dim: ranges for dim, ranges in cut.items() if ranges != ((0, node.shape[dim]),)}
    if isinstance(node, Leaf):
        return _narrow(node.tensor(), cut)
    if isinstance(node, Assembled):
        pieces = _pieces(node, cut, rank)
        if len(pieces) == 1 and not pieces[0][1]:
            source, _, source_cut = pieces[0]
            return read(source, source_cut, rank)
        return _written(node, cut, rank)
    assert isinstance(node, Operation)
    if (structural := _STRUCTURAL.get(node.name)) is not None and _is_single(cut):
        return structural(node, cut, rank)
    if node.name in _JOINS:
        return _written(node, cut, rank)
    return _narrow(_run(node, rank), cut)


def write(node: Node, cut: Cut, out: torch.Tensor, rank: int | None = None) -> None:
    """Write part of a tensor into `out`, piece by piece where it is put together from pieces."""
    cut = {dim: ranges for dim, ranges in cut.items() if ranges != ((0, node.shape[dim]),)}
    if isinstance(node, Assembled):
        for source, place, source_cut in _pieces(node, cut, rank):
            write(source, source_cut, _at(out, place), rank)
    elif isinstance(node, Operation) and node.name in _JOINS:
        _JOINS[node.name](node, cut, out, rank)
    else:
        if isinstance(node, Operation) and node.name not in _STRUCTURAL:
            out.copy_(_narrow(_run(node, rank), cut))
        else:
            for place, single in _singles(cut):
                _at(out, place).copy_(read(node, single, rank))
        release(node)


def leaves(node: Node) -> Iterator[Leaf]:
    """Everything stored that a node is made of."""
    if isinstance(node, Leaf):
        yield node
    elif isinstance(node, Assembled):
        for _, source in node.parts.values():
            yield from leaves(source)
    else:
        assert isinstance(node, Operation)
        for operand in _operands((node.args, node.kwargs)):
            yield from leaves(operand)


def release(node: Node) -> None:
    """Let go of the pages that were mapped to read a tensor."""
    for leaf in leaves(node):
        leaf.release()


def _written(node: Node, cut: Cut, rank: int | None) -> torch.Tensor:
    shape = [_width(cut[dim]) if dim in cut else size for dim, size in enumerate(node.shape)]
    out = torch.empty(shape, dtype=node.dtype)
    write(node, cut, out, rank)
    return out


# -- cuts ----------------------------------------------------------------------------------------------------------

Place = dict[int, Range]
"""Dimension → where along it something goes."""


def _width(ranges: Sequence[Range]) -> int:
    return sum(stop - start for start, stop in ranges)


def _at(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    for dim, (start, stop) in place.items():
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _is_single(cut: Cut) -> bool:
    return all(len(ranges) == 1 for ranges in cut.values())


def _narrow(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    for dim, ranges in cut.items():
        tensor = Shard(dim, ranges).of(tensor)
    return tensor


def _singles(cut: Cut) -> Iterator[tuple[Place, Cut]]:
    """Split a cut into cuts of one range per dimension, each with its place in the result."""
    if not cut:
        yield {}, {}
        return
    dim = next(iter(cut))
    rest = {other: ranges for other, ranges in cut.items() if other != dim}
    offset = 0
    for start, stop in cut[dim]:
        for place, single in _singles(rest):
            yield {dim: (offset, offset + stop - start), **place}, {dim: ((start, stop),), **single}
        offset += stop - start


def _pieces(node: Assembled, cut: Cut, rank: int | None) -> list[tuple[Node, Place, Cut]]:
    """Which stored parts make up a cut: (part, where it goes, what to take of it)."""
    ranks = sorted(node.parts, key=lambda index: (index != rank, index))
    parts = [node.parts[index] for index in ranks]
    if (whole := next((source for shard, source in parts if shard.dim is None), None)) is not None:
        return [(whole, {}, cut)]
    dim = parts[0][0].dim
    assert dim is not None
    wanted = cut.get(dim, ((0, node.shape[dim]),))
    rest = {other: ranges for other, ranges in cut.items() if other != dim}
    shard, source = parts[0]
    if shard.ranges == wanted:
        return [(source, {}, rest)]
    pieces: list[tuple[Node, Place, Cut]] = []
    offset = 0
    for start, stop in wanted:
        while start < stop:
            source, first, count = _find(parts, start, stop)
            pieces.append((source, {dim: (offset, offset + count)}, {dim: ((first, first + count),), **rest}))
            start, offset = start + count, offset + count
    return [(source, {}, taken) for source, _, taken in pieces] if len(pieces) == 1 else pieces


def _find(parts: Sequence[tuple[Shard, Node]], start: int, stop: int) -> tuple[Node, int, int]:
    """(part, offset in it, length) of the first stored stretch that holds position `start`."""
    for shard, source in parts:
        offset = 0
        for first, last in shard.ranges:
            if first <= start < last:
                return source, offset + start - first, min(stop, last) - start
            offset += last - first
    raise AssertionError(f"no rank holds position {start}")


# -- operations that a cut passes through --------------------------------------------------------------------------


def _same(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    return read(node.args[0], cut, rank)


def _cast(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    return read(node.args[0], cut, rank).to(node.dtype)


def _transpose(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, *dims = node.args
    first, second = (dim % len(node.shape) for dim in (dims or (0, 1)))
    swap = {first: second, second: first}
    return read(source, {swap.get(dim, dim): ranges for dim, ranges in cut.items()}, rank).transpose(first, second)


def _permute(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, dims = node.args
    return read(source, {dims[dim] % len(dims): ranges for dim, ranges in cut.items()}, rank).permute(dims)


def _stretch(source: Node, dim: int, start: int, stop: int, cut: Cut, rank: int | None) -> torch.Tensor:
    """Part of `source[start:stop]` along `dim`."""
    ((first, last),) = cut.get(dim, ((0, stop - start),))
    return read(source, {**cut, dim: ((start + first, start + last),)}, rank)


def _slice(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, dim, start, _, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])  # type: ignore[misc]
    if step != 1:
        return _narrow(_run(node, rank), cut)
    dim %= len(node.shape)
    start = start or 0
    start = min(start if start >= 0 else start + source.shape[dim], source.shape[dim])
    return _stretch(source, dim, start, start + node.shape[dim], cut, rank)


def _split(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, sizes, dim = (*node.args, *(None, None, 0)[len(node.args) :])  # type: ignore[misc]
    assert node.output is not None
    dim %= len(node.shape)
    start = sizes * node.output if isinstance(sizes, int) else sum(sizes[: node.output])
    return _stretch(source, dim, start, start + node.shape[dim], cut, rank)


def _select(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, dim, index = node.args
    return _pick(source, dim % len(source.shape), index, cut, rank)


def _unbind(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, dim = (*node.args, *(None, 0)[len(node.args) :])  # type: ignore[misc]
    assert node.output is not None
    return _pick(source, dim % len(source.shape), node.output, cut, rank)


def _pick(source: Node, dim: int, index: int, cut: Cut, rank: int | None) -> torch.Tensor:
    index %= source.shape[dim]
    above = {other + (other >= dim): ranges for other, ranges in cut.items()}
    return read(source, {**above, dim: ((index, index + 1),)}, rank).squeeze(dim)


def _squeeze(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, dim = node.args
    dim %= len(source.shape)
    if source.shape[dim] != 1:
        return read(source, cut, rank)
    return _pick(source, dim, 0, cut, rank)


def _unsqueeze(node: Operation, cut: Cut, rank: int | None) -> torch.Tensor:
    source, dim = node.args
    dim %= len(node.shape)
    below = {other - (other > dim): ranges for other, ranges in cut.items() if other != dim}
    return read(source, below, rank).unsqueeze(dim)


_STRUCTURAL = {
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


def _cat(node: Operation, cut: Cut, out: torch.Tensor, rank: int | None) -> None:
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
                place = out.narrow(dim, offset, high - low)
                write(source, {**rest, dim: ((low - first, high - first),)}, place, rank)
                offset += high - low
            first = last


def _stack(node: Operation, cut: Cut, out: torch.Tensor, rank: int | None) -> None:
    sources, dim = (*node.args, *(None, 0)[len(node.args) :])  # type: ignore[misc]
    dim %= len(node.shape)
    below = {other - (other > dim): ranges for other, ranges in cut.items() if other != dim}
    wanted = [index for start, stop in cut.get(dim, ((0, len(sources)),)) for index in range(start, stop)]
    for offset, index in enumerate(wanted):
        write(sources[index], below, out.select(dim, offset), rank)


_JOINS = {"aten.cat.default": _cat, "aten.stack.default": _stack}

# -- operations that a cut does not pass through -------------------------------------------------------------------

# The strides at the time of recording need not be those at the time of reading, so a view may have to be a copy.
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


def _run(node: Operation, rank: int | None) -> torch.Tensor:
    if node.name in _RESHAPES:
        return read(node.args[0], {}, rank).reshape(node.args[1])
    args, kwargs = _replace((tuple(node.args), node.kwargs), lambda operand: read(operand, {}, rank))
    result = operation(node.name)(*args, **kwargs)
    return result if node.output is None else result[node.output]


@functools.cache
def operation(name: str) -> Any:
    """`aten.cat.default` → the operation of that name."""
    return functools.reduce(getattr, name.split("."), torch.ops)


def _replace(value: Any, replace: Callable[[Node], torch.Tensor]) -> Any:
    if isinstance(value, Node):
        return replace(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replace(item, replace) for item in value)
    if isinstance(value, dict):
        return {key: _replace(item, replace) for key, item in value.items()}
    return value


def _operands(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _operands(item)
    elif isinstance(value, dict):
        yield from _operands(list(value.values()))
