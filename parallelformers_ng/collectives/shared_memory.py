"""Collectives between processes of one machine, through memory that they share."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import (
    ArenaCommunicator,
    Communicator,
    sum_in_rank_order,
    summable_in_place,
)
from parallelformers_ng.errors import CollectiveAbortedError, DivergedError, ProtocolError

try:
    from parallelformers_ng.collectives import _kernel
except ImportError as error:  # installed without a compiler, or a clone that hides what is installed
    _kernel = None  # type: ignore[assignment]
    logging.getLogger("parallelformers_ng").debug("no collectives in shared memory: %s", error)

DONE, ABORTED, TIMED_OUT = 0, 1, 2
"""What the kernel says of a collective; else the ranks have diverged."""
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that the kernel sums, by the number under which it knows them."""


def is_built() -> bool:
    """Return whether the collectives in C were built where this was installed."""
    return _kernel is not None


class SharedMemoryCommunicator(ArenaCommunicator):
    """A rank that meets its peers in an arena. Sums are taken in rank order, so that all ranks hold the same bits.

    The algorithms are those of DeepSpeed's shared-memory all-reduce (one-shot for small messages, reduce-scatter and
    gather for large ones), see `_kernel.c`.

    Args:
        arena: the ranks' memory, mapped into this process. It belongs to the communicator, which closes it.
        rank: this rank.
        timeout: how long a rank waits for a peer before it gives up, in seconds.
        width: ranks that meet, of every so many beside each other; by default all.

    Attributes:
        kernel: with which other C sums by itself (`_kernel_api.h`); `check` what such sums return.
    """

    def __init__(self, arena: Arena, rank: int, timeout: float, width: int | None = None) -> None:
        own = rank if width is None else rank % width
        super().__init__(own, width or arena.world_size, arena, None if width is None else rank)
        self._timeout = timeout
        self._first = 0 if width is None else arena.world_size + rank - own
        self.kernel: Any = _kernel.Kernel(arena.memory, own, self.world_size, timeout, self._first)
        self._sum = self.kernel.all_reduce

    def _part(self, width: int) -> Communicator:
        return SharedMemoryCommunicator(self._arena, self.rank, self._timeout, width)

    def sum(self, tensor: Tensor) -> Tensor:
        # Called twice per layer and token: one look at the tensor, one call.
        kind = KINDS.get(tensor.dtype)
        if kind is None or tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
            return self._sum_any(tensor)
        status = self._sum(tensor.data_ptr(), tensor.numel(), kind)
        if status:
            self.check(status, "all_reduce")
        return tensor

    def _sum_any(self, tensor: Tensor) -> Tensor:
        _check_cpu("all_reduce", tensor)
        tensor = summable_in_place(tensor)
        if tensor.dtype in KINDS:
            return self.sum(tensor)
        parts = self.all_gather(tensor.unsqueeze(0), dim=0)
        return sum_in_rank_order(parts.unbind(0), out=tensor)

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        _check_cpu("all_gather", tensor)
        shape = list(tensor.shape)
        unit_bytes = math.prod(shape[dim + 1 :]) * tensor.element_size()
        outer = math.prod(shape[:dim])
        shape[dim] = sum(sizes)
        source = tensor.detach().contiguous()
        out = torch.empty(shape, dtype=tensor.dtype)
        status = self.kernel.all_gather(source.data_ptr(), out.data_ptr(), outer, unit_bytes, *sizes)
        self.check(status, "all_gather")
        return out

    def reset(self) -> None:
        # The counter in the arena is the only one, and `Arena.reset` has zeroed it.
        if self._arena.counter(self._first + self.rank):
            raise ProtocolError(f"rank {self._place}: reset() was called before the parent's Arena.reset()")
        super().reset()

    def close(self) -> None:
        self.kernel.close()
        super().close()

    def check(self, status: int, operation: str) -> None:
        """Raise the error of a kernel's status. If this rank is the first to know, tell its peers."""
        if status == DONE:
            return
        if status == ABORTED:
            raise self._arena.abort_error()
        step = self._arena.counter(self._first + self.rank)
        who = f"rank {self._place}: {operation} (step {step})"
        if status == TIMED_OUT:
            begin = self._place - self.rank
            late = [begin + peer for peer in range(self.world_size) if self._arena.counter(self._first + peer) < step]
            reason = f"{who}: ranks {late} did not come within {self._timeout:g} s"
            self.abort(reason)
            raise CollectiveAbortedError(reason)
        reason = f"{who}: the peers are in another collective, or in this one with another size or dtype"
        self.abort(reason)
        raise DivergedError(reason)


class StagedCommunicator(Communicator):
    """Copies each tensor to the host, exchanges it there, and copies the result back.

    For several ranks on one device, which NCCL refuses by design, so that the CUDA path can be checked with a single
    GPU; and for ranks of several hosts between which NCCL cannot or must not connect. Never run on a GPU: unmeasured.

    Args:
        host: the communicator that exchanges host tensors.
    """

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.rank, host.world_size)
        self._host = host
        self.cancel_sequence = host.cancel_sequence

    def _part(self, width: int) -> Communicator:
        return StagedCommunicator(self._host.within(width))

    def sum(self, tensor: Tensor) -> Tensor:
        target = summable_in_place(tensor)
        return target.copy_(self._host.sum(target.cpu()))

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        return self._host.gather(tensor.detach().cpu(), dim, sizes).to(tensor.device)

    def abort(self, reason: str) -> None:
        self._host.abort(reason)

    def reset(self) -> None:
        self._host.reset()

    def close(self) -> None:
        self._host.close()


def _check_cpu(operation: str, tensor: Tensor) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(
            f"{operation}: the tensor is on {tensor.device} with layout {tensor.layout}; shared memory needs a dense "
            "tensor on the CPU (NCCL serves CUDA)"
        )
