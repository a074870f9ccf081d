"""Tensors of a quantized checkpoint, which a format reader takes one by one, and checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.checkpoint.encoded import Decoded
from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.checkpoint.formats.numbers import Blocks, Pairs, Scaled
from parallelformers_ng.checkpoint.lazy import LazyTensor, applied
from parallelformers_ng.checkpoint.nodes import Node, leaves
from parallelformers_ng.checkpoint.reading import read
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from parallelformers_ng.sharding.encoding import Encoding

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)

Sizes = Sequence[int | None]  # a required shape, in which None is any size


@dataclass(eq=False)
class StoredTensors:
    """The tensors of a quantized checkpoint that no format reader has taken yet, and the checkpoint's configuration.

    Attributes:
        given_header: metadata to use instead of the metadata in the files' headers; None to read the headers.
        dequantize: whether a weight may be dequantized if no kernel can compute with its format.
        reasons: name of a weight → reason why ranks cannot hold the weight in its stored format.
    """

    state: dict[str, LazyTensor]
    quantization: Mapping[str, Any]
    where: object
    dtype: torch.dtype
    plain: Callable[[], PreTrainedModel]
    given_header: Mapping[str, str] | None = None
    dequantize: bool = False
    reasons: dict[str, str] = field(default_factory=dict, init=False)

    @functools.cached_property
    def transposed(self) -> frozenset[str]:
        """Names of the weights of transformers' `Conv1D` layers, which have the shape `[inputs, outputs]`.

        The set has each name with and without the prefix of the base model, because a checkpoint may use either form.
        """
        model = self.plain()
        prefix = f"{model.base_model_prefix}."
        kinds = {path: getattr(module, "source_cls", type(module)) for path, module in model.named_modules()}
        names = {f"{path}.weight" for path, kind in kinds.items() if issubclass(kind, Conv1D)}
        return frozenset(names | {name.removeprefix(prefix) for name in names} | {prefix + name for name in names})

    def ending_with(self, ending: str) -> list[str]:
        """Return the names of tensors that end with `ending`, with that ending removed."""
        return [name.removesuffix(ending) for name in self.state if name.endswith(ending)]

    def take(self, name: str, of: str, dtypes: Sequence[torch.dtype], shape: Sizes | None = None) -> Node:
        """Remove a required tensor from `state`, and return its node.

        Args:
            of: name of the weight that needs the tensor, for the error.
            shape: required shape; None for any shape.
        """
        if name not in self.state:
            raise self.damaged(f"{name} is missing; {of} cannot be read without it")
        node = self.state.pop(name).node
        if node.dtype not in dtypes:
            raise self.damaged(f"{name} is {node.dtype}; it must be {' or '.join(map(str, dtypes))}")
        if shape is not None:
            self.check(name, node, shape)
        return node

    def maybe(self, name: str, dtypes: Sequence[torch.dtype], shape: Sizes | None = None) -> Node | None:
        """Remove an optional tensor from `state`, and return its node; None if `state` does not have the tensor."""
        return self.take(name, name, dtypes, shape) if name in self.state else None

    def check(self, name: str, node: Node, shape: Sizes) -> None:
        if len(node.shape) != len(shape) or any(s not in (None, n) for n, s in zip(node.shape, shape, strict=True)):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.damaged(f"the shape of {name} is {list(node.shape)}; it must be [{wanted}]")

    def drop(self, *names: str) -> None:
        for name in names:
            self.state.pop(name, None)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where} is damaged: {what}")

    def unread(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where} cannot be read: it {what}")

    def refuse_without_scales(self, kinds: tuple[torch.dtype, ...], ending: str) -> None:
        """Raise CheckpointError if `state` still has a matrix with a quantized data type, because it has no scales."""
        for name, tensor in self.state.items():
            if tensor.dtype in kinds and tensor.ndim > 1:
                raise self.damaged(f"{name} is {tensor.dtype} and has no {ending}")

    def refuse_left(self, endings: Iterable[str]) -> None:
        """Raise CheckpointError if a name in `state` has one of the endings, for example scales without a weight."""
        for name in self.state:
            if name.endswith(tuple(endings)):
                raise self.damaged(f"{name} belongs to no quantized weight")

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
        """Return an expression for a weight with one scale per block.

        If ranks can hold the format, the expression is a `Decoded`, so that the weight can stay quantized. If the
        attribute `dequantize` is set, a kernel must also support the format. Otherwise the weight is dequantized, and
        `reasons` gets the reason. The method reads the zero points.

        Args:
            blocks: blocks along each dimension; None if each dimension has either one scale, or one scale per index.
            inputs: dimension of the inputs, negative: -1 is the last dimension.
        """
        shape = values.shape
        if len(scales.shape) != len(shape) and max(scales.shape, default=1) == 1:
            scales = applied(scales, lambda one: one.reshape((1,) * len(shape)))
        if blocks is None:
            blocks = [1 if count == size else size for count, size in zip(scales.shape, shape, strict=False)]
        counts = [
            -(-size // block) if isinstance(block, int) else count
            for size, block, count in zip(shape, blocks, scales.shape, strict=False)
        ]
        if scales.shape != tuple(counts) or len(blocks) != len(shape):
            raise self.damaged(
                f"the shape of the scales of {name} {list(shape)} is {list(scales.shape)}; its blocks need {counts}"
            )
        if zeros is not None and zeros.shape != scales.shape:
            raise self.damaged(
                f"the shape of the zero points of {name} is {list(zeros.shape)}; its scales need {list(scales.shape)}"
            )
        sizes = tuple(min(b, size) if isinstance(b, int) else b for size, b in zip(shape, blocks, strict=True))
        if zeros is not None and not bool(read(zeros, {}).float().any()):
            zeros = None
        kind = "fp8" if values.dtype is torch.float8_e4m3fn else "int4" if bits <= 4 else "int8"
        size, block = shape[inputs], sizes[inputs]
        why = self._why_not(kind, values, scales, zeros, size, block)
        if not why:
            assert isinstance(block, int)
            encoding = Encoding(kind, inputs, block)
            if encoding.fits_kernels(size // block) or not self.dequantize:
                return self._decoded(name, values, scales, sizes, encoding)
        self.reasons[name] = why
        return Scaled(shape, self.dtype, values, scales, sizes, zeros)

    def _why_not(self, kind: str, values: Node, scales: Node, zeros: Node | None, size: int, block: Blocks) -> str:
        if zeros is not None:
            return "it has zero points"
        if values.dtype not in (torch.int8, torch.float8_e4m3fn):
            return f"it is {values.dtype}"
        if not isinstance(block, int):
            return "the inputs of a group are not contiguous"
        if size % block or (kind == "int4" and block % 2):
            even = " and be even" if kind == "int4" else ""
            return f"its group size is {block}; the group size must divide its {size} inputs{even}"
        if kind == "int4" and torch.promote_types(scales.dtype, self.dtype) is not self.dtype:
            return f"its scales are {scales.dtype}, which {self.dtype} cannot represent; pass another dtype="
        return ""

    def _decoded(self, name: str, values: Node, scales: Node, blocks: Sequence[Blocks], encoding: Encoding) -> Decoded:
        """Return an expression for a weight that ranks can hold quantized. Ranks need a scale for each output, so the
        scale of a block of several outputs is repeated."""
        shape, dim = values.shape, encoding.dim % len(values.shape)
        # This cast of the scales is exact, because the new data type contains all values of the stored data type.
        wide: Any = LazyTensor(scales).to(self.dtype if encoding.kind == "int4" else torch.float32)
        for other, block in enumerate(blocks):
            if other != dim and block != 1:
                assert isinstance(block, int)
                wide = wide.repeat_interleave(block, other).narrow(other, 0, shape[other])
        if encoding.per_byte > 1:
            packed = tuple(size // 2 if at == dim else size for at, size in enumerate(shape))
            values = Pairs(packed, torch.uint8, values, dim, f"{name} of {self.where}")
        return Decoded(shape, self.dtype, encoding, (values, wide.node))

    def groups_of(self, name: str, order: Node, count: int) -> torch.Tensor:
        """Read and check the group number of each input, int64 `[inputs]`; `count` is the number of groups."""
        groups = read(order, {}).long()
        if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise self.damaged(f"{name} has group numbers that are not 0 to {count - 1}")
        return groups

    def header(self) -> dict[str, str]:
        if self.given_header is not None:
            return dict(self.given_header)
        stored = (leaf for tensor in self.state.values() for leaf in leaves(tensor.node))
        files = dict.fromkeys(leaf.file for leaf in stored if isinstance(leaf, FileLeaf))
        return {key: value for file in files for key, value in file.metadata.items()}
