"""Weights in few bits: how numbers become integers and scales and back, and which of these a rank holds.

    w ≈ q · s          q: integers, s: a scale for each block of numbers along one dimension

Symmetric, as torchao's weight-only schemes are: the integers and scales of a weight that is cut are, bit for bit, the
slices of those that torchao makes of the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from parallelformers_ng.sharding.plan import Shard, TensorPlan

SCALE = "_scale"
"""What the name of a weight's scales ends with; its integers have the name of the weight."""
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)

_LEAST_SCALE = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Encoding:
    """How one weight is held.

    Attributes:
        kind: what the integers are: "int8".
        dim: the dimension along which numbers share a scale, that of the inputs, counted from the last one, -1.
        block: how many of them share one. The plan cuts between blocks, or shares the only one.
    """

    kind: str
    dim: int
    block: int

    def fits(self, tensor: TensorPlan) -> bool:
        """Whether a tensor can be held so, and cut as its plan says."""
        size = tensor.shape[self.dim]
        if tensor.dtype not in HIGH_PRECISION or not size or size % self.block:
            return False
        cuts = [shard.ranges for shard in tensor.shards if shard.dim == self.dim % len(tensor.shape)]
        return self.block == size or not any(end % self.block for cut in cuts for held in cut for end in held)

    def parts(self, tensor: TensorPlan) -> tuple[TensorPlan, TensorPlan]:
        """What ranks hold in the place of a tensor: integers and scales."""
        shape, dim = list(tensor.shape), self.dim % len(tensor.shape)
        shape[dim] //= self.block
        shards = tuple(self._of_scales(shard, dim, shape[dim]) for shard in tensor.shards)
        name, storage = tensor.name + SCALE, tensor.storage + SCALE
        scales = replace(tensor, name=name, shape=tuple(shape), dtype=torch.float32, shards=shards, storage=storage)
        return replace(tensor, dtype=torch.int8), scales

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Integers and scales of a weight, which is whole along `dim`, or has whole blocks."""
        scales = self.scales(weight)
        return self.integers(weight, scales), scales

    def scales(self, weight: Tensor) -> Tensor:
        """The scale of each block: its largest number is 127.5 steps from zero."""
        blocks = weight.unflatten(self.dim, (-1, self.block))
        largest = blocks.abs().amax(self.dim)
        return (largest / 127.5).clamp(min=_LEAST_SCALE).float()

    def integers(self, weight: Tensor, scales: Tensor) -> Tensor:
        """The nearest integers, ties to even."""
        return (weight * (1.0 / self.spread(scales, weight.shape))).round().clamp(-128, 127).to(torch.int8)

    def decode(self, integers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight, or the part of it that the integers and scales are of."""
        return (integers * self.spread(scales, integers.shape)).to(dtype)

    def spread(self, scales: Tensor, shape: torch.Size) -> Tensor:
        """Scales as they are to be multiplied with numbers of `shape`, of which they are."""
        if scales.shape[self.dim] in (1, shape[self.dim]):
            return scales
        return scales.repeat_interleave(self.block, self.dim)

    def _of_scales(self, shard: Shard, dim: int, blocks: int) -> Shard:
        """Which scales go with a shard of the integers."""
        if shard.dim != dim:
            return shard
        if blocks == 1:  # that of a whole row, of which the rank has a part
            return replace(shard, dim=None, ranges=(), zero=False)
        return replace(shard, ranges=tuple((start // self.block, stop // self.block) for start, stop in shard.ranges))
