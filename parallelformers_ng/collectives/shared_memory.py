"""Runs collectives between processes of one machine through shared memory."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import ArenaCommunicator, Communicator, sum_in_rank_order, summable
from parallelformers_ng.errors import CollectiveAbortedError, DivergedError, ProtocolError

try:
    from parallelformers_ng.collectives import _kernel
except ImportError as error:  # the C kernel was not built, for example without a compiler
    _kernel = None  # type: ignore[assignment]
    logging.getLogger("parallelformers_ng").debug("collectives in shared memory are not available: %s", error)

# A collective of the C kernel returns one of these numbers, or another number if the ranks' collectives differ.
DONE, ABORTED, TIMED_OUT = 0, 1, 2
# Data type that the C kernel can sum → the kernel's number for the type.
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def is_built() -> bool:
    return _kernel is not None


class SharedMemoryCommunicator(ArenaCommunicator):
    """A communicator through shared memory (`Arena`). It sums in rank order, so that all ranks get the same bits.

    The algorithms are those of DeepSpeed's shared-memory all-reduce (`csrc/cpu/comm/shm.cpp` of
    https://github.com/deepspeedai/DeepSpeed). Small messages are summed in one shot. Large messages are
    reduce-scattered and gathered; see `_kernel.c`.

    Args:
        width: number of adjacent ranks of a stage, for a communicator of one stage; None for all ranks.

    Attributes:
        kernel: this rank's `_kernel.Kernel`. Other C code calls it, too (`_kernel_api.h`); `check` takes its status.
    """

    def __init__(self, arena: Arena, rank: int, timeout: float, width: int | None = None) -> None:
        own_rank = rank if width is None else rank % width
        super().__init__(own_rank, width or arena.world_size, arena, None if width is None else rank)
        self._timeout = timeout
        self._first = 0 if width is None else arena.world_size + rank - own_rank
        self.kernel: Any = _kernel.Kernel(arena.memory, own_rank, self.world_size, timeout, self._first)
        self._sum = self.kernel.all_reduce

    def _part(self, width: int) -> Communicator:
        return SharedMemoryCommunicator(self._arena, self.rank, self._timeout, width)

    def sum(self, tensor: Tensor) -> Tensor:
        # The common case comes first and calls no function, because a step sums twice in each layer.
        kind = KINDS.get(tensor.dtype)
        if kind is None or tensor.requires_grad or not tensor.is_cpu or not tensor.is_contiguous():
            return self._sum_any(tensor)
        status = self._sum(tensor.data_ptr(), tensor.numel(), kind)
        if status:
            self.check(status, "all_reduce")
        return tensor

    def _sum_any(self, tensor: Tensor) -> Tensor:
        _check_cpu("all_reduce", tensor)
        tensor = summable(tensor)
        if tensor.dtype in KINDS:
            return self.sum(tensor)
        return sum_in_rank_order(self.all_gather(tensor.unsqueeze(0), dim=0).unbind(), out=tensor)

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
        # `Arena.reset` of the parent sets the counter to 0, and must come first.
        if self._arena.counter(self._first + self.rank):
            raise ProtocolError(f"rank {self._place}: reset() was called before the parent's Arena.reset()")
        super().reset()

    def close(self) -> None:
        self.kernel.close()
        super().close()

    def check(self, status: int, operation: str) -> None:
        """Raise the error that the kernel's status stands for. An error of this rank also aborts the other ranks."""
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
        reason = f"{who}: another rank is in another collective, or in this one with another size or dtype"
        self.abort(reason)
        raise DivergedError(reason)


class StagedCommunicator(Communicator):
    """A communicator for CUDA tensors, which copies tensors to the host, exchanges the copies, and copies results back.

    NCCL refuses several ranks on one device; this class allows such ranks, for example to check the CUDA path with a
    single GPU. It also serves hosts between which NCCL cannot or must not connect. It ran with two ranks on one GPU.
    """

    def __init__(self, host: Communicator) -> None:
        super().__init__(host.rank, host.world_size)
        self._host = host
        self.cancel_sequence = host.cancel_sequence

    def _part(self, width: int) -> Communicator:
        return StagedCommunicator(self._host.within(width))

    def sum(self, tensor: Tensor) -> Tensor:
        target = summable(tensor)
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
