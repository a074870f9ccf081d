"""Nodes that quantize or dequantize a weight while its parts are read.

A rank reads its slice of the quantized numbers and of the scales. A node reads its source a few rows at a time, so a
rank never has the whole weight in memory. If each row has one scale, a rank reads whole rows, even to keep only part of
each row. If each group has a scale, a rank reads only its own groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallelformers_ng.checkpoint.nodes import ByLines, Computed, Node, Operation, leaf_of
from parallelformers_ng.checkpoint.reading import Cut, is_read_in_parts, read, read_copy
from parallelformers_ng.sharding.encoding import Encoding
from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan


@dataclass(eq=False)
class Decoded(Computed):
    """A weight in high precision that is dequantized when it is read; `parts` are its quantized numbers and scales."""

    encoding: Encoding
    parts: tuple[Node, Node]

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        numbers, scales = self.parts
        dim, per_byte, block = self.encoding.dim % len(self.shape), self.encoding.per_byte, self.encoding.block
        rest = {other: ranges for other, ranges in cut.items() if other != dim}
        scale = read(scales, rest, rank)
        if dim not in cut:
            return self.encoding.decode(read(numbers, rest, rank), scale, self.dtype)
        pieces = []
        for start, stop in cut[dim]:  # two elements may share a byte, so read whole bytes and drop surplus elements
            first, last = _widened(start, stop, per_byte)
            stored = read(numbers, {**rest, dim: ((first // per_byte, last // per_byte),)}, rank)
            own = scale if scale.shape[dim] == 1 else scale.index_select(dim, torch.arange(first, last) // block)
            pieces.append(self.encoding.decode(stored, own, self.dtype).narrow(dim, start - first, stop - start))
        return torch.cat(pieces, dim)


@dataclass(eq=False)
class EncodedPart(ByLines):
    """The quantized numbers of a weight, or its scales (`is_scales`), which are quantized when they are read."""

    encoding: Encoding
    weight: Node
    is_scales: bool = False

    def __post_init__(self) -> None:
        self.across = 1 if self.encoding.dim % len(self.shape) == 0 else 0

    def part(self, cut: Mapping[int, tuple[Range, ...]], rank: int | None) -> Tensor:
        if is_read_in_parts(self.weight):
            return super().part(cut, rank)
        return replace(self, weight=leaf_of(read(self.weight, {}, rank))).part(cut, rank)

    def lines(self, cut: Cut, rank: int | None) -> Tensor:
        dim = self.encoding.dim % len(self.shape)
        if dim not in cut:
            return self._of(read_copy(self.weight, cut, rank))
        each = self.weight.shape[dim] // self.shape[dim]
        pieces = []
        for start, stop in cut[dim]:  # a scale depends on a whole block, so read whole blocks and drop surplus results
            first, last = _widened(start * each, stop * each, self.encoding.block)
            piece = self._of(read_copy(self.weight, {**cut, dim: ((first, last),)}, rank))
            pieces.append(piece.narrow(dim, start - first // each, stop - start))
        return torch.cat(pieces, dim)

    def _of(self, weight: Tensor) -> Tensor:
        scales = self.encoding.scales(weight)
        return scales if self.is_scales else self.encoding.numbers(weight, scales)


def _widened(start: int, stop: int, block: int) -> Range:
    """Return the smallest range that contains `start` to `stop` and begins and ends at multiples of `block`."""
    return start // block * block, -(-stop // block) * block


def stored_nodes(plan: ShardPlan, name: str, node: Node) -> dict[str, Node]:
    """Map the storage names of one tensor of the model to expressions that read the values from the checkpoint.

    A tensor that the plan quantizes has two storage names: for its quantized numbers and for its scales. If the
    checkpoint stores both in the plan's format, the expressions read them unchanged.
    """
    encoding = plan.quantized.get(name)
    if encoding is None:
        return {name: node}
    numbers, scales = plan.parts(name)
    stored = stored_encoding(node)
    if stored is not None and stored.encoding == encoding:
        return dict(zip((numbers.name, scales.name), stored.parts, strict=True))
    if node.dtype != plan.tensors[name].dtype:
        dtype = plan.tensors[name].dtype
        node = Operation(node.shape, dtype, "aten._to_copy.default", (node,), {"dtype": dtype})
    return {
        numbers.name: EncodedPart(numbers.shape, numbers.dtype, encoding, node),
        scales.name: EncodedPart(scales.shape, scales.dtype, encoding, node, is_scales=True),
    }


def stored_encoding(node: Node) -> Decoded | None:
    """Return `node` as one `Decoded` if it is computed from quantized numbers and scales of a checkpoint, else None.

    The operations between them may be casts, transposes, splits, and joins of several quantized tensors (experts). The
    result is None for a split or a join along the dimension whose elements share a scale.
    """
    if isinstance(node, Decoded):
        return node
    if not isinstance(node, Operation) or node.name not in _PASSED:
        return None
    stacked = isinstance(node.args[0], (list, tuple))
    encodings = [stored_encoding(source) for source in (node.args[0] if stacked else node.args[:1])]
    stored = [each for each in encodings if each is not None]
    kinds = {(each.encoding, each.parts[0].dtype, each.parts[1].dtype) for each in stored}
    if len(stored) < len(encodings) or len(kinds) != 1:
        return None
    encoding, size = stored[0].encoding, len(stored[0].shape)
    dim = _PASSED[node.name](node, size, encoding.dim % size)
    if dim is None:
        return None
    encoding = replace(encoding, dim=dim - len(node.shape))
    if node.name == "aten._to_copy.default":
        return Decoded(node.shape, node.dtype, encoding, stored[0].parts)

    def passed(which: int, per: int) -> Operation:
        """Apply the operation to the numbers (`which=0`) or scales (`which=1`) instead of the weight.

        Each number or scale stands for `per` elements of the weight.
        """
        shape, sources = list(node.shape), [each.parts[which] for each in stored]
        shape[dim] //= per
        args = (sources if stacked else sources[0], *node.args[1:])
        return Operation(tuple(shape), sources[0].dtype, node.name, args, node.kwargs, node.output)

    return Decoded(node.shape, node.dtype, encoding, (passed(0, encoding.per_byte), passed(1, encoding.block)))


def _swapped(node: Operation, size: int, dim: int) -> int:
    first, second = (other % size for other in (node.args[1:] or (0, 1)))
    return {first: second, second: first}.get(dim, dim)


def _across(node: Operation, size: int, dim: int) -> int | None:
    """Return `dim`, along which elements share a scale; None if the operation joins or splits tensors along `dim`."""
    place = 2 if "split" in node.name else 1
    along = node.args[place] if len(node.args) > place else 0
    return None if along % size == dim else dim


def _stacked(node: Operation, size: int, dim: int) -> int:
    along = (node.args[1] if len(node.args) > 1 else 0) % (size + 1)
    return dim + (along <= dim)


# Torch operations that can run on quantized numbers and scales instead of on the weight. The function of an operation
# takes the operation, its operand's number of dimensions, and the dimension of the operand along which elements share a
# scale. The function returns that dimension of the result; None if the operation needs the dequantized weight.
_PASSED: dict[str, Callable[[Operation, int, int], int | None]] = {
    "aten._to_copy.default": lambda node, size, dim: dim,
    "aten.t.default": _swapped,
    "aten.transpose.int": _swapped,
    "aten.cat.default": _across,
    "aten.slice.Tensor": _across,
    "aten.split.Tensor": _across,
    "aten.split_with_sizes.default": _across,
    "aten.stack.default": _stacked,
}


def whole_node(plan: ShardPlan, tensor: TensorPlan, node_of: Callable[[TensorPlan], Node]) -> Node:
    """Return an expression that reads a whole tensor of the model, dequantized if the ranks hold it quantized."""
    parts = plan.parts(tensor.name)
    if len(parts) == 1:
        return node_of(parts[0])
    numbers, scales = map(node_of, parts)
    return Decoded(tensor.shape, tensor.dtype, plan.quantized[tensor.name], (numbers, scales))
