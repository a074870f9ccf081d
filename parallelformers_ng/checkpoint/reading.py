"""Reading a part of a tensor that lies in files, in shared memory or with the workers.

A rank needs a slice of a tensor that a checkpoint may hold under another name, in another type, as one of many experts
or as a third of a fused projection. `read` carries the slice down through the operations to the leaves, so that only
the bytes asked for are touched. An operation it does not know is run on its whole operands, and the result is cut.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.checkpoint.nodes import Computed, Leaf, Node, Operation, ShardedNode, leaves, release
from parallelformers_ng.checkpoint.operations import JOINS, TRANSPARENT, Cut, Place, at
from parallelformers_ng.sharding.partition import width_of
from parallelformers_ng.sharding.tensor_plan import WHOLE, Shard

# The strides at the time of recording need not be those at the time of reading, so a view may have to be a copy.
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")


def read_shard(
    node: Node, shard: Shard, rank: int | None = None, *, copy: bool = True, rows_apart: bool = False
) -> torch.Tensor:
    """Return one rank's part of a tensor: a view where it is stored so, else a copy, contiguous.

    Args:
        shard: the part.
        rank: whose shards to prefer where several ranks stored the same.
        copy: False gives any view, contiguous or not, for a caller that copies it at once and then releases the node.
        rows_apart: a view of a matrix whose rows are contiguous, but not the matrix, need not be copied either.
    """
    shape = shard.shape(node.shape)
    if shard.zero or 0 in shape:
        return torch.zeros(shape, dtype=node.dtype, device="cpu")
    cut: Cut = {} if shard.dim is None else {shard.dim: shard.ranges}
    part = read(node, cut, rank)
    if not copy:
        return part
    if part.is_contiguous() or (rows_apart and part.ndim == 2 and part.stride(1) == 1):
        if any(leaf.holds(part) for leaf in leaves(node)):
            return part
        release(node)
        return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
    return read_copy(node, cut, rank)


def lies_in_file(node: Node, shard: Shard, rank: int) -> bool:
    """Return whether one rank's part of a tensor is a stretch of a mapped file, so that reading it is mapping it."""
    if isinstance(node, ShardedNode) and rank in node.parts and node.parts[rank][0] == shard:
        node, shard = node.parts[rank][1], WHOLE
    if shard.zero or not isinstance(node, FileLeaf) or not node.file.maps(node.key):
        return False
    return shard.dim is None or (len(shard.ranges) == 1 and math.prod(node.shape[: shard.dim]) == 1)


def read(node: Node, cut: Cut, rank: int | None = None) -> torch.Tensor:
    """Return part of a tensor: a view of what is stored where the cut allows, whatever its strides."""
    cut = _without_whole(cut, node.shape)
    if isinstance(node, Leaf):
        return _narrow(node.tensor(), cut)
    if isinstance(node, ShardedNode):
        pieces = _pieces(node, cut, rank)
        if len(pieces) == 1 and not pieces[0][1]:
            source, _, source_cut = pieces[0]
            return read(source, source_cut, rank)
        return read_copy(node, cut, rank)
    if isinstance(node, Computed):
        return node.part(cut, rank)
    assert isinstance(node, Operation)
    is_single = all(len(ranges) == 1 for ranges in cut.values())
    if node.name in TRANSPARENT and is_single and (below := TRANSPARENT[node.name](node, cut)) is not None:
        return below.then(read(below.source, below.cut, rank))
    if node.name in JOINS:
        return read_copy(node, cut, rank)
    return _narrow(_run(node, rank), cut)


def is_read_in_parts(node: Node) -> bool:
    """Return whether a part of a tensor costs about as much less as it is smaller than the whole."""
    if isinstance(node, Operation):
        operands = [part for part in tree_leaves(node.args) if isinstance(part, Node)]
        return (node.name in TRANSPARENT or node.name in JOINS) and all(map(is_read_in_parts, operands))
    return True


def read_copy(node: Node, cut: Cut, rank: int | None = None) -> torch.Tensor:
    """Return part of a tensor in memory of its own."""
    widths = {dim: width_of(ranges) for dim, ranges in cut.items()}
    shape = [widths.get(dim, size) for dim, size in enumerate(node.shape)]
    out = torch.empty(shape, dtype=node.dtype, device="cpu")
    write(node, cut, out, rank)
    return out


def write(node: Node, cut: Cut, out: torch.Tensor, rank: int | None = None) -> None:
    """Write part of a tensor into `out`, piece by piece where it is put together from pieces."""
    cut = _without_whole(cut, node.shape)
    if isinstance(node, ShardedNode):
        for source, place, source_cut in _pieces(node, cut, rank):
            write(source, source_cut, at(out, place), rank)
    elif isinstance(node, Operation) and node.name in JOINS:
        for source, view, source_cut in JOINS[node.name](node, cut):
            write(source, source_cut, view(out), rank)
    else:
        if isinstance(node, Computed):
            out.copy_(read(node, cut, rank))
        elif isinstance(node, Operation) and node.name not in TRANSPARENT:
            out.copy_(_narrow(_run(node, rank), cut))
        else:
            for place, single in _single_cuts(cut):
                at(out, place).copy_(read(node, single, rank))
        release(node)


@functools.cache
def _operation(name: str) -> Any:
    """`aten.cat.default` → the operation of that name."""
    return functools.reduce(getattr, name.split("."), torch.ops)


def _run(node: Operation, rank: int | None) -> torch.Tensor:
    """Return the whole result of an operation, from its whole operands."""
    if node.name in _RESHAPES:
        return read(node.args[0], {}, rank).reshape(node.args[1])
    args, kwargs = tree_map_only(Node, lambda operand: read(operand, {}, rank), (node.args, node.kwargs))
    result = _operation(node.name)(*args, **kwargs)
    return result if node.output is None else result[node.output]


def _pieces(node: ShardedNode, cut: Cut, rank: int | None) -> list[tuple[Node, Place, Cut]]:
    """Return the stored parts that make up a cut: (part, target, cut of the part)."""
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


def _without_whole(cut: Cut, shape: Sequence[int]) -> Cut:
    """Return the same cut of a tensor of `shape`, without the dimensions that it takes whole."""
    return {dim: ranges for dim, ranges in cut.items() if ranges != ((0, shape[dim]),)}


def _narrow(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Cut a tensor that is in memory: a view where one range of each dimension is wanted."""
    for dim, ranges in cut.items():
        tensor = Shard(dim, ranges).of(tensor)
    return tensor


def _single_cuts(cut: Cut) -> Iterator[tuple[Place, Cut]]:
    """Split a cut into those of one range each, with the place of each in the result."""
    if not cut:
        yield {}, {}
        return
    dim, *_ = cut
    rest = {other: ranges for other, ranges in cut.items() if other != dim}
    offset = 0
    for start, stop in cut[dim]:
        for place, single in _single_cuts(rest):
            yield {dim: (offset, offset + stop - start), **place}, {dim: ((start, stop),), **single}
        offset += stop - start
