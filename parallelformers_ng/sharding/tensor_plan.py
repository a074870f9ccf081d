"""Defines the plan of one tensor: its slices for each rank, and the bytes of the slices. Pure data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from parallelformers_ng.sharding.partition import Range, width_of
from parallelformers_ng.sharding.tensors import dotted, owned_tensors


@dataclass(frozen=True)
class Shard:
    """One rank's part of one tensor."""

    dim: int | None = None  # the dimension that is cut, or None if the rank holds the whole tensor
    # the ranges held along `dim`, in the order in which the rank concatenates them. Ranges may repeat.
    ranges: tuple[Range, ...] = ()
    # Whether the rank holds zeros instead of the values, so that it adds nothing to a sum over the ranks: for a bias
    # that rank 0 adds, or on a rank without heads.
    zero: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this shard of a tensor whose whole shape is `whole`."""
        if self.dim is None:
            return whole
        return (*whole[: self.dim], width_of(self.ranges), *whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this shard of a whole tensor, on the same device.

        The result is `tensor` itself if it is not cut, a view for one range, and otherwise a new tensor.
        """
        if self.zero:
            return torch.zeros(self.shape(tuple(tensor.shape)), dtype=tensor.dtype, device=tensor.device)
        if self.dim is None:
            return tensor
        pieces = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.ranges or [(0, 0)]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


WHOLE = Shard()
ZERO = Shard(zero=True)
Cut = tuple[tuple[Shard, ...], str]  # one shard for each rank, and the rule that made the shards


@dataclass(frozen=True)
class TensorPlan:
    """The plan of one parameter or buffer."""

    name: str  # dotted name of the tensor in the model
    shape: tuple[int, ...]  # shape of the whole tensor
    dtype: torch.dtype  # data type on the ranks, after the cast
    shards: tuple[Shard, ...]  # one `Shard` per rank
    storage: str  # name of the stored tensor; tied tensors that are cut in the same way have the same storage name
    is_buffer: bool = False  # whether the tensor is a buffer, not a parameter
    rule: str = ""  # the policy rule that cut the tensor, for people; "" if the tensor stays whole

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(shard == WHOLE for shard in self.shards)

    def bytes_on(self, rank: int) -> int:
        """Return the bytes of a rank's part, without quantization; zeros count like values."""
        return bytes_of(self.shards[rank].shape(self.shape), self.dtype)

    @property
    def bytes_whole(self) -> int:
        """Bytes of the whole tensor after the cast, without quantization."""
        return bytes_of(self.shape, self.dtype)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def plans_of_tensors(
    model: nn.Module, cut_of: Callable[[str], Cut], dtype_of: Callable[[str, torch.Tensor, bool], torch.dtype]
) -> dict[str, TensorPlan]:
    """Plan every tensor of a model; tied tensors that are cut in the same way share their storage.

    `dtype_of` gets the name, the tensor, and whether checkpoints hold it.
    """
    tensors: dict[str, TensorPlan] = {}
    holders: dict[tuple[int, tuple[Shard, ...]], str] = {}
    for path, module in model.named_modules():
        for short, tensor, is_buffer in owned_tensors(module):
            name = dotted(path, short)
            shards, rule = cut_of(name)
            dtype = dtype_of(name, tensor, short not in module._non_persistent_buffers_set)
            storage = holders.setdefault((id(tensor), shards), name)
            tensors[name] = TensorPlan(name, tuple(tensor.shape), dtype, shards, storage, is_buffer, rule)
    return tensors
