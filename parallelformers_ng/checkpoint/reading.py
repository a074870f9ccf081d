"""Reads parts of tensors from files, from shared memory or from the workers.

A rank needs a slice of a tensor. A checkpoint may store a tensor under another name, with another data type, as one of
many experts, or within a fused projection. `read` finds which part of each stored tensor the slice needs, and reads
only the bytes of that part. An operation that `read` does not know runs on whole operands, and its result is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.checkpoint.mapping import file_at
from parallelformers_ng.checkpoint.nodes import Computed, Leaf, Node, Operation, ShardedNode, release
from parallelformers_ng.sharding.partition import Range, width_of
from parallelformers_ng.sharding.tensor_plan import WHOLE, Shard

# These run as `reshape`: a `view` that was valid for the lazy tensor may need a copy, because strides can differ.
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")

# A part of a tensor: dimension → ranges along it, which are concatenated. Dimensions without an entry are whole.
Cut = dict[int, tuple[Range, ...]]

View = Callable[[torch.Tensor], torch.Tensor]  # makes a view, such as a transpose or a slice


def run(node: Operation, operand: Callable[[Node], torch.Tensor]) -> torch.Tensor:
    """Run the operation of `node` on whole tensors; `operand` is a function from an operand's node to its tensor."""
    args, kwargs = tree_map_only(Node, operand, (node.args, node.kwargs))
    name = "aten.reshape.default" if node.name in _VIEWS else node.name
    operation: Any = functools.reduce(getattr, name.split("."), torch.ops)
    result = operation(*args, **kwargs)
    return result if node.output is None else result[node.output]


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


# What to read for a part of an operation's result: (operand, view, part of the operand). If the operation has a single
# operand, the view turns that part into the part of the result. If the operation joins operands, the view returns the
# place in the result to which that part is copied.
Piece = tuple[Node, View, Cut]


def _view(node: Operation, cut: Cut) -> Piece | None:
    """Find out which part of its operand a view (transpose, slice, select, …) needs for the part `cut` of its result.

    The operation runs on a `meta` operand whose dimensions have different strides. So the strides and the storage
    offset of the result tell which dimensions of the operand the result has, and where they begin. The function returns
    None for an empty part, and for a slice with a step: then the whole operand must be read.
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


# Name of an operation → function from (operation, wanted part of its result) to the part of the operand to read. The
# wanted part has one range per dimension. The function returns None if the operation must run on the whole operand.
_TRANSPARENT: dict[str, Callable[[Operation, Cut], Piece | None]] = {
    "aten._to_copy.default": lambda node, cut: (node.args[0], lambda part: part.to(node.dtype), cut),
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


_JOINS = {"aten.cat.default": _cat, "aten.stack.default": _stack}


def read_shard(
    node: Node, shard: Shard, rank: int | None = None, *, copy: bool = True, rows_apart: bool = False
) -> torch.Tensor:
    """Read one rank's shard of a tensor: a view of the stored tensor if possible, else a copy.

    The result is contiguous, except with `copy=False` or `rows_apart=True`. After a copy, the memory of the source is
    freed. A shard of zeros is a new tensor.

    Args:
        copy: whether to copy a view that is not contiguous. A caller that passes False must copy the result itself,
            and then call `release(node)`.
        rows_apart: whether the result may be a matrix with gaps between its rows, which are contiguous.
    """
    shape = shard.shape(node.shape)
    if shard.zero or 0 in shape:
        return torch.zeros(shape, dtype=node.dtype, device="cpu")
    cut: Cut = {} if shard.dim is None else {shard.dim: shard.ranges}
    part = read(node, cut, rank)
    if not copy:
        return part
    if part.is_contiguous() or (rows_apart and part.ndim == 2 and part.stride(1) == 1):
        if file_at(part.data_ptr()) is not None:
            return part
        release(node)
        return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
    return read_copy(node, cut, rank)


def lies_in_file(node: Node, shard: Shard, rank: int) -> bool:
    """Return whether a rank's shard is a contiguous range of a mapped file, so that the rank needs no copy of it."""
    if isinstance(node, ShardedNode) and rank in node.parts and node.parts[rank][0] == shard:
        node, shard = node.parts[rank][1], WHOLE
    if shard.zero or not isinstance(node, FileLeaf) or not node.file.maps(node.key):
        return False
    return shard.dim is None or (len(shard.ranges) == 1 and math.prod(node.shape[: shard.dim]) == 1)


def read(node: Node, cut: Cut, rank: int | None = None) -> torch.Tensor:
    """Read a part of a tensor, on CPU: a view of the stored tensor if possible, with any strides, else a copy.

    Args:
        cut: part to read; {} for the whole tensor.
        rank: rank whose shard to read if several ranks stored the same part; None for any rank.
    """
    cut = _without_whole(cut, node.shape)
    if isinstance(node, Leaf):
        return _narrow(node.tensor(), cut)
    if isinstance(node, ShardedNode):
        pieces = _pieces(node, cut, rank)
        if len(pieces) == 1:
            source, _, source_cut = pieces[0]
            return read(source, source_cut, rank)
        return read_copy(node, cut, rank)
    if isinstance(node, Computed):
        return node.part(cut, rank)
    assert isinstance(node, Operation)
    is_single = all(len(ranges) == 1 for ranges in cut.values())
    if node.name in _TRANSPARENT and is_single and (piece := _TRANSPARENT[node.name](node, cut)) is not None:
        source, view, source_cut = piece
        return view(read(source, source_cut, rank))
    if node.name in _JOINS:
        return read_copy(node, cut, rank)
    return _narrow(run(node, lambda operand: read(operand, {}, rank)), cut)


def is_read_in_parts(node: Node) -> bool:
    """Return whether `read` can read a part of a tensor without reading a whole operand of an operation."""
    if isinstance(node, Operation):
        operands = [part for part in tree_leaves(node.args) if isinstance(part, Node)]
        return (node.name in _TRANSPARENT or node.name in _JOINS) and all(map(is_read_in_parts, operands))
    return True


def read_copy(node: Node, cut: Cut, rank: int | None = None) -> torch.Tensor:
    """Return a contiguous copy of a part of a tensor, and free the mapped memory that was read."""
    widths = {dim: width_of(ranges) for dim, ranges in cut.items()}
    shape = [widths.get(dim, size) for dim, size in enumerate(node.shape)]
    out = torch.empty(shape, dtype=node.dtype, device="cpu")
    write(node, cut, out, rank)
    return out


def write(node: Node, cut: Cut, out: torch.Tensor, rank: int | None = None) -> None:
    """Copy a part of a tensor into `out`, one stored tensor at a time, and free the mapped memory of each."""
    cut = _without_whole(cut, node.shape)
    if isinstance(node, ShardedNode) or (isinstance(node, Operation) and node.name in _JOINS):
        pieces = _pieces(node, cut, rank) if isinstance(node, ShardedNode) else _JOINS[node.name](node, cut)
        for source, view, source_cut in pieces:
            write(source, source_cut, view(out), rank)
        return
    several = next((dim for dim, ranges in cut.items() if len(ranges) > 1), None)
    if several is not None and (isinstance(node, Leaf) or (isinstance(node, Operation) and node.name in _TRANSPARENT)):
        offset = 0
        for start, stop in cut[several]:
            write(node, {**cut, several: ((start, stop),)}, out.narrow(several, offset, stop - start), rank)
            offset += stop - start
        return
    out.copy_(read(node, cut, rank))
    release(node)


def _pieces(node: ShardedNode, cut: Cut, rank: int | None) -> list[Piece]:
    parts = [node.parts[index] for index in sorted(node.parts, key=lambda index: (index != rank, index))]
    if (whole := next((source for shard, source in parts if shard.dim is None), None)) is not None:
        return [(whole, unchanged, cut)]
    shard, source = parts[0]
    dim = shard.dim
    assert dim is not None
    wanted = cut.get(dim, ((0, node.shape[dim]),))
    rest = {other: ranges for other, ranges in cut.items() if other != dim}
    if shard.ranges == wanted:
        return [(source, unchanged, rest)]
    pieces: list[Piece] = []
    offset = 0
    for start, stop in wanted:
        while start < stop:
            source, first, count = _find(parts, start, stop)
            view = functools.partial(torch.narrow, dim=dim, start=offset, length=count)
            pieces.append((source, view, {dim: ((first, first + count),), **rest}))
            start, offset = start + count, offset + count
    return pieces


def _find(parts: Sequence[tuple[Shard, Node]], start: int, stop: int) -> tuple[Node, int, int]:
    """Find a shard that contains index `start` of the tensor. Return the shard's node, the position of `start` in the
    shard, and how many of the indices from `start` to `stop` follow there."""
    for shard, source in parts:
        offset = 0
        for first, last in shard.ranges:
            if first <= start < last:
                return source, offset + start - first, min(stop, last) - start
            offset += last - first
    raise AssertionError(f"no rank holds position {start}")


def _without_whole(cut: Cut, shape: Sequence[int]) -> Cut:
    return {dim: ranges for dim, ranges in cut.items() if ranges != ((0, shape[dim]),)}


def _narrow(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    for dim, ranges in cut.items():
        tensor = Shard(dim, ranges).of(tensor)
    return tensor
