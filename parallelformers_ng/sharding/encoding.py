"""Weights in few bits: how numbers become small ones and scales, and back, and which of these a rank holds.

    w ≈ q · s          q: small numbers, s: a scale for each block of them along one dimension

Symmetric, like torchao's weight-only schemes: slices of the quantized whole weight are, bit for bit, the quantized
slices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.tensor_plan import TensorPlan

SCALE = "_scale"
"""What the name of a weight's scales ends with; its small numbers have the name of the weight."""
_AT_ONCE = 1 << 20
"""Bytes of small numbers that are in float32 at a time, on CPU."""
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Kind:
    """The format of the small numbers.

    Attributes:
        dtype: the data type in which they are held.
        largest: how many scales the largest number of a block is from zero.
        per_byte: how many there are in an element of that type, the first one in its lowest bits.
        own_scales: scales are fp32 and at least so large; None if they have the data type of the weight.
    """

    dtype: torch.dtype
    largest: float
    per_byte: int = 1
    own_scales: float | None = None


_KINDS = {
    "int8": _Kind(torch.int8, 127.5, own_scales=torch.finfo(torch.float32).eps),
    "int4": _Kind(torch.uint8, 7.5, per_byte=2),
    "fp8": _Kind(torch.float8_e4m3fn, 448.0, own_scales=torch.finfo(torch.float32).tiny),
}


@dataclass(frozen=True)
class Encoding:
    """How one weight is held.

    Attributes:
        kind: format of the small numbers: "int8"; "int4", two in a byte; "fp8", floats with 4 bits of exponent.
        dim: the dimension along which numbers share a scale, that of the inputs, counted from the last one, -1.
        block: how many of them share one. The plan cuts between blocks, or shares the only one.
    """

    kind: str
    dim: int
    block: int

    @property
    def per_byte(self) -> int:
        return _KINDS[self.kind].per_byte

    def fits_kernels(self, scales: int) -> bool:
        """Return whether the kernels read a matrix that is held so as it is.

        Args:
            scales: how many an output has.
        """
        if self.kind == "int8":
            return scales == 1
        return self.kind == "int4" and (self.block in (32, 64) or self.block % 128 == 0)

    def has_scale_per_output(self, scales: Tensor) -> bool:
        """Return whether the numbers, one in a byte, may be multiplied before they are scaled."""
        return self.per_byte == 1 and self.dim == -1 and scales.shape[-1] == 1

    def shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the weight, given that of its small numbers."""
        shape = list(numbers)
        shape[self.dim] *= self.per_byte
        return tuple(shape)

    def misfit(self, tensor: TensorPlan) -> str:
        """Return why a tensor cannot be held so, or not be cut as its plan says; "" if it can."""
        size, border = tensor.shape[self.dim], self.per_byte
        if tensor.dtype not in HIGH_PRECISION or not size:
            return f"it is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        if self.block != size:
            border = self.block
        if size % border:
            return f"{size} inputs are no multiple of {border}"
        cuts = [shard.ranges for shard in tensor.shards if shard.dim == self.dim % len(tensor.shape)]
        if any(end % border for cut in cuts for span in cut for end in span):
            return f"ranks have parts of its {size} inputs that are no multiple of {border}"
        return ""

    def parts(self, tensor: TensorPlan) -> tuple[TensorPlan, TensorPlan]:
        """Small numbers and scales that ranks hold in the place of a tensor."""
        kind, dim = _KINDS[self.kind], self.dim % len(tensor.shape)
        numbers = replace(_divided(tensor, dim, kind.per_byte), dtype=kind.dtype)
        dtype = tensor.dtype if kind.own_scales is None else torch.float32
        name, storage = tensor.name + SCALE, tensor.storage + SCALE
        scales = replace(_divided(tensor, dim, self.block), name=name, storage=storage, dtype=dtype)
        if scales.shape[dim] == 1:  # one scale for a whole row; a rank may hold a part of that row
            shards = (replace(s, dim=None, ranges=(), zero=False) if s.dim == dim else s for s in scales.shards)
            scales = replace(scales, shards=tuple(shards))
        return numbers, scales

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Small numbers and scales of a weight, which is whole along `dim`, or has whole blocks."""
        scales = self.scales(weight)
        return self.numbers(weight, scales), scales

    def scales(self, weight: Tensor) -> Tensor:
        """Return the scale of each block."""
        kind = _KINDS[self.kind]
        scales = weight.unflatten(self.dim, (-1, self.block)).abs().amax(self.dim) / kind.largest
        if kind.own_scales is None:
            return scales.clamp(min=torch.finfo(scales.dtype).smallest_normal)
        return scales.float().clamp(min=kind.own_scales)

    def numbers(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Return the nearest small numbers, ties to even."""
        kind, spread = _KINDS[self.kind], self.spread(scales, weight.shape)
        if kind.dtype.is_floating_point:
            return (weight.float() / spread).clamp(-kind.largest, kind.largest).to(kind.dtype)
        nearest = (weight * (1.0 / spread)).round()
        integers = nearest.clamp(-kind.largest - 0.5, kind.largest - 0.5).to(torch.int8)
        if kind.per_byte == 1:
            return integers
        first, second = integers.unflatten(self.dim, (-1, 2)).unbind(self.dim)
        return (first & 15 | second << 4).view(kind.dtype)

    def decode(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight, or the part of it that the numbers and scales are of."""
        along = 1 if self.dim % numbers.ndim == 0 else 0
        lines = max(1, _AT_ONCE * numbers.shape[along] // max(1, numbers.numel()))
        if lines >= numbers.shape[along] or not numbers.is_cpu or torch.compiler.is_compiling():
            return self._decoded(numbers, scales, dtype)
        out = torch.empty(self.shape(tuple(numbers.shape)), dtype=dtype, device=numbers.device)
        parts = (each.split(lines, along) for each in (out, numbers, scales))
        for to, some, their in zip(*parts, strict=True):
            to.copy_(self._decoded(some, their, dtype))
        return out

    def _decoded(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if self.per_byte == 2:
            pairs = numbers.view(torch.int8)
            numbers = torch.stack((pairs << 4 >> 4, pairs >> 4), self.dim).flatten(self.dim - 1, self.dim)
        elif numbers.dtype.is_floating_point:
            numbers = numbers.to(dtype)  # which has all that 8 bits can say
        out = numbers.new_empty(numbers.shape, dtype=dtype)
        blocks = scales.shape[self.dim]
        in_blocks = blocks, numbers.shape[self.dim] // max(1, blocks)
        # A device rounds each product as it writes it: nothing wider than the weight is ever in its memory.
        numbers, target = (each.unflatten(self.dim, in_blocks) for each in (numbers, out))
        torch.mul(numbers, scales.unsqueeze(self.dim), out=target)
        return out

    def spread(self, scales: Tensor, shape: torch.Size) -> Tensor:
        """Broadcast scales to `shape`, the shape of the numbers that they multiply."""
        if scales.shape[self.dim] in (1, shape[self.dim]):
            return scales
        return scales.repeat_interleave(self.block, self.dim)


def _divided(tensor: TensorPlan, dim: int, by: int) -> TensorPlan:
    """Cut the small tensor at the places of the large one; each of its elements stands for several along a
    dimension."""
    shape = list(tensor.shape)
    shape[dim] //= by
    shards = (replace(s, ranges=divided(s.ranges, by)) if s.dim == dim else s for s in tensor.shards)
    return replace(tensor, shape=tuple(shape), shards=tuple(shards))


def divided(ranges: tuple[Range, ...], by: int) -> tuple[Range, ...]:
    """Return ranges in units of so many, of which each has whole ones."""
    return tuple((start // by, stop // by) for start, stop in ranges)
