"""Collectives that `torch.compile` passes through: operators of torch, opaque to the compiler.

Outside a trace the communicator is called directly, which is several microseconds cheaper.

A CUDA graph records what NCCL queues, so a capture is no trace. Whoever records operators instead, as the tests do on
the CPU, says so by `operators_alone`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator

_NAMESPACE = "parallelformers_ng"
_numbers = itertools.count()
_communicators: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class _Thread(threading.local):
    operators_alone = False


_thread = _Thread()


def is_traced() -> bool:
    """Whether only operators of torch count in what this thread does."""
    return torch.compiler.is_compiling() or _thread.operators_alone


@contextlib.contextmanager
def operators_alone() -> Iterator[None]:
    """Within it, this thread is being recorded by its operators."""
    before, _thread.operators_alone = _thread.operators_alone, True
    try:
        yield
    finally:
        _thread.operators_alone = before


def register(communicator: Communicator) -> int:
    """The number by which the operators know a communicator; given at the first call."""
    if communicator.traced_number is None:
        communicator.traced_number = next(_numbers)
        _communicators[communicator.traced_number] = communicator
    return communicator.traced_number


def all_reduce(communicator: Communicator, tensor: Tensor) -> Tensor:
    """`communicator.all_reduce(tensor)`, also in a trace. There the sum is always a new tensor."""
    if is_traced():
        return torch.ops.parallelformers_ng.all_reduce(tensor, communicator.traced_number)
    return communicator.all_reduce(tensor)


def all_gather(communicator: Communicator, tensor: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """`communicator.all_gather(tensor, dim, sizes)`, also in a trace."""
    if is_traced():
        return torch.ops.parallelformers_ng.all_gather(tensor, communicator.traced_number, dim, list(sizes))
    return communicator.all_gather(tensor, dim, sizes)


@torch.library.custom_op(f"{_NAMESPACE}::all_reduce", mutates_args=())
def _all_reduce(tensor: Tensor, communicator: int) -> Tensor:
    return _communicators[communicator].all_reduce(tensor.clone(memory_format=torch.contiguous_format))


@_all_reduce.register_fake
def _(tensor: Tensor, communicator: int) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@torch.library.custom_op(f"{_NAMESPACE}::all_gather", mutates_args=())
def _all_gather(tensor: Tensor, communicator: int, dim: int, sizes: list[int]) -> Tensor:
    return _communicators[communicator].all_gather(tensor, dim, sizes)


@_all_gather.register_fake
def _(tensor: Tensor, communicator: int, dim: int, sizes: list[int]) -> Tensor:
    shape = list(tensor.shape)
    shape[dim] = sum(sizes)
    return tensor.new_empty(shape)
