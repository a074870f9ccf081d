"""The tensors of a quantized checkpoint. Each is taken away once it is understood; leftovers are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.checkpoint.encoded import Decoded
from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.checkpoint.formats.numbers import Blocks, Pairs, Repeated, Scaled
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.nodes import Node, leaves
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from parallelformers_ng.sharding.encoding import Encoding

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


class StoredTensors:
    """The stored tensors, by name.

    Args:
        state: all of it.
        quantization: the configuration of the quantization.
        where: the checkpoint, for errors.
        dtype: the data type of weights in high precision.
        plain: builds the model that the weights are for, on `meta`, or has it.
        header: text about tensors, name → text; None: the text in the files.
        dequantize: whether ranks may hold in high precision what no kernel reads.

    Attributes:
        reasons: why weights are not held as they are stored, by name.
    """

    def __init__(
        self,
        state: Mapping[str, LazyTensor],
        quantization: Mapping[str, Any],
        where: object,
        dtype: torch.dtype,
        plain: Callable[[], PreTrainedModel],
        header: Mapping[str, str] | None = None,
        dequantize: bool = False,
    ) -> None:
        self.state = dict(state)
        self.quantization = quantization
        self.where = where
        self.dtype = dtype
        self.dequantize = dequantize
        self.reasons: dict[str, str] = {}
        self._plain = plain
        self._header = header

    @functools.cached_property
    def transposed(self) -> frozenset[str]:
        """Names of weights that libraries store transposed: those of `Conv1D`, which multiplies from the other side.
        They may be saved with or without the name of the part without the head."""
        model = self._plain()
        prefix = f"{model.base_model_prefix}."
        kinds = {path: getattr(module, "source_cls", type(module)) for path, module in model.named_modules()}
        names = {f"{path}.weight" for path, kind in kinds.items() if issubclass(kind, Conv1D)}
        return frozenset(names | {name.removeprefix(prefix) for name in names} | {prefix + name for name in names})

    def ending_with(self, ending: str) -> list[str]:
        """Return the names with that ending, without it."""
        return [name.removesuffix(ending) for name in self.state if name.endswith(ending)]

    def take(
        self, name: str, of: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None] | None = None
    ) -> Node:
        """Return the tensor of a name, without which the weight `of` cannot be read.

        Args:
            dtypes: data types that it may have.
            shape: required shape, None for any number.

        Raises:
            CheckpointError: it is not there, or is something else.
        """
        if name not in self.state:
            raise self.damaged(f"{name} is missing, without which {of} cannot be read")
        node = self.state.pop(name).node
        if node.dtype not in dtypes:
            raise self.damaged(f"{name} is {node.dtype}; it takes {' or '.join(map(str, dtypes))}")
        if shape is not None:
            self.check(name, node, shape)
        return node

    def maybe(self, name: str, dtypes: Sequence[torch.dtype], shape: Sequence[int | None] | None = None) -> Node | None:
        """`take` of what need not be there."""
        return self.take(name, name, dtypes, shape) if name in self.state else None

    def check(self, name: str, node: Node, shape: Sequence[int | None]) -> None:
        """Raise for another shape."""
        if len(node.shape) != len(shape) or any(s not in (None, n) for n, s in zip(node.shape, shape, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.damaged(f"{name} is {list(node.shape)}, and what it belongs to needs [{wanted}]")

    def drop(self, *names: str) -> None:
        for name in names:
            self.state.pop(name, None)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged: {what}")

    def unread(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where} {what}, which cannot be read")

    def refuse_without_scales(self, kinds: tuple[torch.dtype, ...], ending: str) -> None:
        """Raise for numbers of these types that had no scales."""
        for name, tensor in self.state.items():
            if tensor.dtype in kinds and tensor.ndim > 1:
                raise self.damaged(f"{name} is {tensor.dtype} and has no {ending}")

    def refuse_left(self, endings: Iterable[str]) -> None:
        """Raise for what belongs to a weight that is not there."""
        for name in self.state:
            if name.endswith(tuple(endings)):
                raise self.damaged(f"{name} belongs to no weight that is quantized so")

    def scaled(
        self,
        name: str,
        values: Node,
        scales: Node,
        blocks: Sequence[Blocks] | None = None,
        zeros: Node | None = None,
        inputs: int = -1,
        bits: int = 8,
    ) -> Node:
        """Return a weight of which numbers share scales and zero points: as it is stored where `quantize=` has a scheme
        of that kind, else in high precision.

        Args:
            values: the numbers, in the shape of the weight.
            scales: one for each block along each dimension, or one in all.
            blocks: for each dimension; None as the number of scales says: one for all, or one for each.
            zeros: zero points, one for each scale.
            inputs: the dimension that counts inputs, from the last one.
            bits: bits of the integers.

        Raises:
            CheckpointError: there are not as many scales as that makes.
        """
        shape = values.shape
        if len(scales.shape) != len(shape) and max(scales.shape, default=1) == 1:
            one: Any = LazyTensor(scales)
            scales = one.reshape((1,) * len(shape)).node
        if blocks is None:
            blocks = [1 if count == size else size for count, size in zip(scales.shape, shape, strict=False)]
        counts = [
            -(-size // block) if isinstance(block, int) else count
            for size, block, count in zip(shape, blocks, scales.shape, strict=False)
        ]
        if scales.shape != tuple(counts) or len(blocks) != len(shape):
            raise self.damaged(
                f"the scales of {name} {list(shape)} are {list(scales.shape)}, and its blocks need {counts}"
            )
        if zeros is not None and zeros.shape != scales.shape:
            raise self.damaged(
                f"the zero points of {name} are {list(zeros.shape)}, and its scales {list(scales.shape)}"
            )
        sizes = tuple(min(b, size) if isinstance(b, int) else b for size, b in zip(shape, blocks, strict=True))
        zeros = self._without_zeros(zeros)
        kind = "fp8" if values.dtype is torch.float8_e4m3fn else "int4" if bits <= 4 else "int8"
        why = _why_not(kind, values, scales, sizes, zeros, inputs, self.dtype)
        if not why:
            size, block = shape[inputs], sizes[inputs]
            assert isinstance(block, int)
            encoding = Encoding(kind, inputs, block)
            if encoding.fits_kernels(size // block) or not self.dequantize:
                return self._as_it_is(name, values, scales, sizes, encoding)
        self.reasons[name] = why
        return Scaled(shape, self.dtype, values, scales, sizes, zeros)

    def _as_it_is(self, name: str, values: Node, scales: Node, blocks: Sequence[Blocks], encoding: Encoding) -> Decoded:
        """Return a weight made of its numbers and scales, one scale a line."""
        shape, dim = values.shape, encoding.dim % len(values.shape)
        # widened: those of fewer bits are exact in them
        wide: Any = LazyTensor(scales).to(self.dtype if encoding.kind == "int4" else torch.float32)
        scales = wide.node
        for other, block in enumerate(blocks):
            if other != dim and block != 1:
                assert isinstance(block, int)
                counts = list(scales.shape)
                counts[other] = shape[other]
                scales = Repeated(tuple(counts), scales.dtype, scales, other, block)
        if encoding.per_byte > 1:
            packed = tuple(size // 2 if at == dim else size for at, size in enumerate(shape))
            values = Pairs(packed, torch.uint8, values, dim, f"{name} of {self.where}")
        return Decoded(shape, self.dtype, encoding, (values, scales))

    def groups_of(self, name: str, order: Node, count: int) -> torch.Tensor:
        """Return the group of each input, of which there are so many."""
        groups = read(order, {}).long()
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise self.damaged(f"{name} names groups {int(groups.min())} to {int(groups.max())}, and there are {count}")
        return groups

    def _without_zeros(self, zeros: Node | None) -> Node | None:
        """Zero points, None if all of them are 0."""
        return None if zeros is None or not bool(read(zeros, {}).float().any()) else zeros

    def header(self) -> dict[str, str]:
        """Return the text about tensors."""
        if self._header is not None:
            return dict(self._header)
        stored = (leaf for tensor in self.state.values() for leaf in leaves(tensor.node))
        files = dict.fromkeys(leaf.file for leaf in stored if isinstance(leaf, FileLeaf))
        return {key: value for file in files for key, value in file.metadata.items()}


def _why_not(
    kind: str,
    values: Node,
    scales: Node,
    blocks: Sequence[Blocks],
    zeros: Node | None,
    inputs: int,
    dtype: torch.dtype,
) -> str:
    """Return why numbers cannot be held as those of a scheme are; "" if they can."""
    if zeros is not None:
        return "it has zero points"
    if values.dtype not in (torch.int8, torch.float8_e4m3fn):
        return f"it is {values.dtype}"
    size, block = values.shape[inputs], blocks[inputs]
    if not isinstance(block, int):
        return "the inputs that share a scale do not lie side by side"
    if size % block or (kind == "int4" and block % 2):
        return f"{block} inputs share a scale, and it has {size}"
    if kind == "int4" and torch.promote_types(scales.dtype, dtype) is not dtype:
        return f"its scales are {scales.dtype}, which {dtype} does not hold (dtype= says in which data type it is read)"
    return ""
