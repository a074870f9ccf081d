"""Collectives that `torch.compile` passes through: operators of torch, opaque to the compiler.

Outside a trace the communicator does its work directly, which is several microseconds cheaper.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator

_numbers = itertools.count()
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


def register(communicator: Communicator) -> int:
    """The number by which the operators know a communicator; given at the first call."""
    if communicator.traced_number is None:
        communicator.traced_number = next(_numbers)
        _communicators[communicator.traced_number] = communicator
    return communicator.traced_number


@torch.library.custom_op("parallelformers_ng::all_reduce", mutates_args=())
def _all_reduce(tensor: Tensor, communicator: int) -> Tensor:
    return _communicators[communicator].sum(tensor.clone(memory_format=torch.contiguous_format))


@_all_reduce.register_fake
def _(tensor: Tensor, communicator: int) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op("parallelformers_ng::all_gather", mutates_args=())
def _all_gather(tensor: Tensor, communicator: int, dim: int, sizes: list[int]) -> Tensor:
    return _communicators[communicator].gather(tensor, dim, sizes)


@_all_gather.register_fake
def _(tensor: Tensor, communicator: int, dim: int, sizes: list[int]) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = sum(sizes)
    return tensor.new_empty(shape)
