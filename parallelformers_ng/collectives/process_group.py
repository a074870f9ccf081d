"""Communicators on top of torch.distributed: gloo for the CPU, where shared memory cannot be used, and NCCL for CUDA.

They make a process group object of their own: the default group, the environment variables and the ports stay free
for the program. The ranks meet through a file.
"""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import (
    ArenaCommunicator,
    give_way,
    sum_in_rank_order,
    summable_in_place,
)
from parallelformers_ng.errors import CollectiveAbortedError

WATCH_SECONDS = 0.02


def create_rendezvous() -> int:
    """A descriptor of an empty anonymous file for the ranks to meet in: it has no name, so nobody else finds it, and
    nothing is left on disk however the processes end. The caller closes it, and passes it to every rank."""
    return os.memfd_create("parallelformers_ng-rendezvous", os.MFD_CLOEXEC)


def rendezvous_path(fd: int) -> str:
    """The path under which this process, and its user's others, open a rendezvous as long as `fd` is open here."""
    return f"/proc/{os.getpid()}/fd/{fd}"


class ProcessGroupCommunicator(ArenaCommunicator):
    """A communicator on a c10d process group.

    Args:
        rank, world_size: as everywhere.
        store: where the ranks meet.
        timeout: how long a rank waits for a peer, in seconds.
        arena: carries the abort and cancel words.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, timeout: float, arena: Arena) -> None:
        super().__init__(rank, world_size, arena)
        self._store = store
        self._timeout = timeout
        self._generation = 0
        self._group = self._connect()

    @abstractmethod
    def _new_group(self, store: dist.Store) -> Any:
        """A process group whose ranks meet at `store`."""

    @abstractmethod
    def _finish(self, work: Any, operation: str) -> None:
        """Waits for a work object as far as the backend needs it; raises CollectiveAbortedError."""

    def _connect(self) -> Any:
        return self._new_group(dist.PrefixStore(str(self._generation), self._store))

    def _gather(self, tensor: Tensor, operation: str) -> list[Tensor]:
        """All ranks' tensors, equal in shape and dtype, which travel as bytes: no backend knows every dtype."""
        self._check_aborted()
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.world_size)]
        if data.numel():
            self._finish(self._group.allgather([parts], [data]), operation)
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        longest = max(sizes)
        if tensor.shape[dim] < longest:  # the backends want equal parts
            shape = list(tensor.shape)
            shape[dim] = longest
            padded = tensor.new_zeros(shape)
            padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.detach())
            tensor = padded
        parts = self._gather(tensor, "all_gather")
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def reset(self) -> None:
        self._forget_recorded()
        self._group.abort()
        self._generation += 1
        self._group = self._connect()

    def close(self) -> None:
        if self._group is not None:
            self._forget_recorded()
            self._group.abort()
            self._group = None
        super().close()

    def _forget_recorded(self) -> None:
        for action in self._before_reset:
            action()

    def _check_aborted(self) -> None:
        if self._arena.aborted:
            raise self._arena.abort_error()

    def _give_up(self, reason: str, cause: Exception | None = None) -> None:
        self.abort(reason)
        raise CollectiveAbortedError(reason) from cause


class GlooCommunicator(ProcessGroupCommunicator):
    """CPU collectives over loopback sockets. Slow on small tensors (10 to 50 times shared memory)."""

    def sum(self, tensor: Tensor) -> Tensor:
        # Gloo sums in an order of its own; gathered parts are summed in rank order, with the bits of shared memory.
        out = summable_in_place(tensor)
        return sum_in_rank_order(self._gather(out, "all_reduce"), out=out)

    def _new_group(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from the stub
        # The device named here spares the environment a GLOO_SOCKET_IFNAME.
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=self._timeout)
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _finish(self, work: Any, operation: str) -> None:
        """Waits on the host, with an eye on the abort word."""
        start = time.monotonic()
        while not work.is_completed():
            self._check_aborted()
            waited = time.monotonic() - start
            if waited > self._timeout:
                self._give_up(f"rank {self.rank}: {operation} did not end within {self._timeout:g} s")
            give_way(waited)
        try:
            work.wait()
        except RuntimeError as error:  # a peer's connection broke
            self._give_up(f"rank {self.rank}: {operation} failed: {error}", error)


class NcclCommunicator(ProcessGroupCommunicator):
    """CUDA collectives. Never run on a GPU: unmeasured.

    A collective is queued on the current stream and the host goes on. NCCL sums in an order and a precision of its own
    (16-bit floats as such), but each element in one place, so that all ranks hold the same bits. What hangs on the
    device cannot see the abort word: a thread watches it and aborts the process group, which ends the queued kernels.

    Args:
        device: this rank's CUDA device. The others are those of ProcessGroupCommunicator.
    """

    capturable = True

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, timeout: float, arena: Arena, device: torch.device
    ) -> None:
        self._device = device
        self._closed = threading.Event()
        super().__init__(rank, world_size, store, timeout, arena)
        self._watcher = threading.Thread(target=self._watch, name="nccl-abort-watch", daemon=True)
        self._watcher.start()

    def sum(self, tensor: Tensor) -> Tensor:
        self._check_aborted()
        out = summable_in_place(tensor)
        if out.numel():
            self._finish(self._group.allreduce([out.view(-1)], dist.AllreduceOptions()), "all_reduce")
        return out

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()
        super().close()

    def _new_group(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout)
        with torch.cuda.device(self._device):
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

    def _finish(self, work: Any, operation: str) -> None:
        work.wait()  # the current stream waits, not the host

    def _watch(self) -> None:
        aborted: Any = None
        while not self._closed.wait(WATCH_SECONDS):
            if self._arena.aborted and self._group is not aborted:
                aborted = self._group
                aborted.abort()
