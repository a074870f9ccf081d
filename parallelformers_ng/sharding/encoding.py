"""Quantizes and dequantizes weights, and plans how the quantized numbers and the scales of a weight are cut.

    w ≈ q · s          q: quantized numbers, s: one scale for each block of numbers along one dimension

Symmetric, like torchao's weight-only schemes. A slice of the quantized weight equals, bit for bit, the quantized slice
of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallelformers_ng.sharding.tensor_plan import Shard, TensorPlan

SCALE = "_scale"  # appended to a weight's name to name its scales; the quantized numbers keep the weight's name
_DECODE_BYTES = 1 << 20  # bytes of quantized numbers that a CPU dequantizes at a time, to limit temporary memory
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Kind:
    """A format of quantized numbers."""

    dtype: torch.dtype  # data type of the stored tensor
    largest: float  # the scale of a block is its largest absolute weight divided by this number
    per_byte: int = 1  # quantized numbers packed in one stored element; the first number has the lowest bits
    # smallest allowed scale, if scales are float32; None if scales have the data type of the weight
    own_scales: float | None = None


_KINDS = {
    "int8": _Kind(torch.int8, 127.5, own_scales=torch.finfo(torch.float32).eps),
    "int4": _Kind(torch.uint8, 7.5, per_byte=2),
    "fp8": _Kind(torch.float8_e4m3fn, 448.0, own_scales=torch.finfo(torch.float32).tiny),
}


@dataclass(frozen=True)
class Encoding:
    """How one weight is quantized, in a format of torchao."""

    kind: str  # format of the quantized numbers: "int8"; "int4", two numbers in a byte; "fp8", float8_e4m3fn
    dim: int  # the weight's dimension of inputs, along which numbers share a scale; negative: -1 is the last dimension
    # Number of consecutive inputs that share one scale. Ranks are cut between such blocks. A scale for all inputs is
    # replicated.
    block: int

    @property
    def per_byte(self) -> int:
        """Number of quantized numbers in one byte: 2 for "int4", 1 for other kinds."""
        return _KINDS[self.kind].per_byte

    def fits_kernels(self, scales: int) -> bool:
        if self.kind == "int8":
            return scales == 1
        return self.kind == "int4" and (self.block in (32, 64) or self.block % 128 == 0)

    def has_scale_per_output(self, scales: Tensor) -> bool:
        return self.per_byte == 1 and self.dim == -1 and scales.shape[-1] == 1

    def shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a weight whose quantized numbers have the shape `numbers`."""
        shape = list(numbers)
        shape[self.dim] *= self.per_byte
        return tuple(shape)

    def misfit(self, tensor: TensorPlan) -> str:
        size = tensor.shape[self.dim]
        if tensor.dtype not in HIGH_PRECISION or not size:
            return f"it is {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        border = self.per_byte if self.block == size else self.block
        if size % border:
            return f"its {size} inputs are not a multiple of {border}"
        cuts = [shard.ranges for shard in tensor.shards if shard.dim == self.dim % len(tensor.shape)]
        if any(end % border for cut in cuts for span in cut for end in span):
            return f"ranks cut its {size} inputs at places that are not a multiple of {border}"
        return ""

    def parts(self, tensor: TensorPlan) -> tuple[TensorPlan, TensorPlan]:
        kind, dim = _KINDS[self.kind], self.dim % len(tensor.shape)
        numbers = replace(_divided(tensor, dim, kind.per_byte), dtype=kind.dtype)
        dtype = tensor.dtype if kind.own_scales is None else torch.float32
        name, storage = tensor.name + SCALE, tensor.storage + SCALE
        scales = replace(_divided(tensor, dim, self.block), name=name, storage=storage, dtype=dtype)
        if scales.shape[dim] == 1:  # a single scale for a row cannot be cut, so every rank gets it
            shards = (replace(s, dim=None, ranges=(), zero=False) if s.dim == dim else s for s in scales.shards)
            scales = replace(scales, shards=tuple(shards))
        return numbers, scales

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return a weight's quantized numbers and scales, in the shapes and data types that `parts` plans."""
        scales = self.scales(weight)
        return self.numbers(weight, scales), scales

    def scales(self, weight: Tensor) -> Tensor:
        """Return the scales of a weight's blocks: the weight's shape, but along `dim` one element for each block.

        Scales are float32 for "int8" and "fp8", and have the weight's data type for "int4".
        """
        kind = _KINDS[self.kind]
        scales = weight.unflatten(self.dim, (-1, self.block)).abs().amax(self.dim) / kind.largest
        if kind.own_scales is None:
            return scales.clamp(min=torch.finfo(scales.dtype).smallest_normal)
        return scales.float().clamp(min=kind.own_scales)

    def numbers(self, weight: Tensor, scales: Tensor) -> Tensor:
        """Round `weight / scales` to the quantized numbers: int8, uint8 for "int4", or float8_e4m3fn for "fp8".

        Ties round to even. "int4" packs two neighbours along `dim` in a byte, the first in the lower bits. As in
        torchao, integers are rounded from `weight * (1 / scales)`.
        """
        kind, scales = _KINDS[self.kind], scales.unsqueeze(self.dim)
        blocks = weight.unflatten(self.dim, (-1, self.block))
        if kind.dtype.is_floating_point:
            numbers = (blocks.float() / scales).clamp(-kind.largest, kind.largest).to(kind.dtype)
        else:
            nearest = (blocks * (1.0 / scales)).round()
            numbers = nearest.clamp(-kind.largest - 0.5, kind.largest - 0.5).to(torch.int8)
        numbers = numbers.flatten(self.dim - 1, self.dim)
        if kind.per_byte == 1:
            return numbers
        first, second = numbers.unflatten(self.dim, (-1, 2)).unbind(self.dim)
        return (first & 15 | second << 4).view(kind.dtype)

    def decode(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize a weight, or a slice of a weight, from its quantized numbers and scales to `dtype`."""
        along = 1 if self.dim % numbers.ndim == 0 else 0
        lines = max(1, _DECODE_BYTES * numbers.shape[along] // max(1, numbers.numel()))
        if lines >= numbers.shape[along] or not numbers.is_cpu or torch.compiler.is_compiling():
            return self._decoded(numbers, scales, dtype)
        out = torch.empty(self.shape(tuple(numbers.shape)), dtype=dtype, device=numbers.device)
        parts = (each.split(lines, along) for each in (out, numbers, scales))
        for target, part, part_scales in zip(*parts, strict=True):
            target.copy_(self._decoded(part, part_scales, dtype))
        return out

    def _decoded(self, numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if self.per_byte == 2:
            pairs = numbers.view(torch.int8)
            numbers = torch.stack((pairs << 4 >> 4, pairs >> 4), self.dim).flatten(self.dim - 1, self.dim)
        elif numbers.dtype.is_floating_point:
            numbers = numbers.to(dtype)  # loses nothing: even bfloat16 can represent every fp8 number
        out = numbers.new_empty(numbers.shape, dtype=dtype)
        blocks = scales.shape[self.dim]
        in_blocks = blocks, numbers.shape[self.dim] // max(1, blocks)
        # With `out`, CUDA writes products in `dtype`, and needs no memory for products in the wider type of the scales.
        numbers, target = (each.unflatten(self.dim, in_blocks) for each in (numbers, out))
        torch.mul(numbers, scales.unsqueeze(self.dim), out=target)
        return out


def _divided(tensor: TensorPlan, dim: int, by: int) -> TensorPlan:
    shape = list(tensor.shape)
    shape[dim] //= by

    def divided(shard: Shard) -> Shard:
        return replace(shard, ranges=tuple((start // by, stop // by) for start, stop in shard.ranges))

    shards = (divided(shard) if shard.dim == dim else shard for shard in tensor.shards)
    return replace(tensor, shape=tuple(shape), shards=tuple(shards))
