"""Communicators on top of torch.distributed: gloo for the CPU, where shared memory cannot be used, and NCCL for CUDA.

They make a process group object of their own: the default group, the environment variables and the ports stay free
for the program. The ranks meet through a file.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import (
    ArenaCommunicator,
    give_way,
    sum_in_rank_order,
    summable_in_place,
)
from parallelformers_ng.errors import CollectiveAbortedError, StartupError

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
        place: as in ArenaCommunicator.
    """

    def __init__(
        self, rank: int, world_size: int, store: dist.Store, timeout: float, arena: Arena, place: int | None = None
    ) -> None:
        super().__init__(rank, world_size, arena, place)
        self._store = store
        self._timeout = timeout
        self._generation = 0
        self._group = self._connect()

    @abstractmethod
    def _new_group(self, store: dist.Store) -> Any:
        """A process group whose ranks meet at `store`."""

    @abstractmethod
    def _gather_into(self, parts: list[Tensor], data: Tensor) -> None:
        """Writes every rank's `data`, bytes, into `parts`; as far as the backend waits for it."""

    def _of_part(self, width: int) -> tuple[int, int, dist.Store, float, Arena, int]:
        """The first arguments of the communicator within a stage."""
        store = dist.PrefixStore(f"stage {self.rank // width} of {width}", self._store)
        return self.rank % width, width, store, self._timeout, self._arena, self.rank

    def _abort_group(self) -> None:
        self._group.abort()

    def _connect(self) -> Any:
        return self._new_group(dist.PrefixStore(str(self._generation), self._store))

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """All ranks' tensors, equal in shape and dtype, which travel as bytes: no backend knows every dtype."""
        self._check_aborted()
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.world_size)]
        if data.numel():
            self._gather_into(parts, data)
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        longest = max(sizes)
        if tensor.shape[dim] < longest:  # the backends want equal parts
            shape = list(tensor.shape)
            shape[dim] = longest
            padded = tensor.new_zeros(shape)
            padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.detach())
            tensor = padded
        parts = self._gather(tensor)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def reset(self) -> None:
        self._forget_recorded()
        self._abort_group()
        self._generation += 1
        self._group = self._connect()
        super().reset()

    def close(self) -> None:
        if self._group is not None:
            self._forget_recorded()
            self._abort_group()
            self._group = None
        super().close()

    def _forget_recorded(self) -> None:
        for action in self._before_reset:
            action()

    def _check_aborted(self) -> None:
        if self._arena.aborted:
            raise self._arena.abort_error()


class GlooCommunicator(ProcessGroupCommunicator):
    """CPU collectives over loopback sockets. Slow on small tensors (10 to 50 times shared memory)."""

    def _part(self, width: int) -> GlooCommunicator:
        return GlooCommunicator(*self._of_part(width))

    def sum(self, tensor: Tensor) -> Tensor:
        # Gloo sums in an order of its own; gathered parts are summed in rank order, with the bits of shared memory.
        out = summable_in_place(tensor)
        return sum_in_rank_order(self._gather(out), out=out)

    def _new_group(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from the stub
        # The device named here spares the environment a GLOO_SOCKET_IFNAME.
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=self._timeout)
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _gather_into(self, parts: list[Tensor], data: Tensor) -> None:
        """Waits on the host, with an eye on the abort word."""
        work, start = self._group.allgather([parts], [data]), time.monotonic()
        while not work.is_completed():
            self._check_aborted()
            waited = time.monotonic() - start
            if waited > self._timeout:
                self._give_up(f"rank {self._place}: a gather over gloo did not end within {self._timeout:g} s")
            give_way(waited)
        try:
            work.wait()
        except RuntimeError as error:  # a peer's connection broke
            self._give_up(f"rank {self._place}: a gather over gloo failed: {error}", error)

    def _give_up(self, reason: str, cause: Exception | None = None) -> None:
        self.abort(reason)
        raise CollectiveAbortedError(reason) from cause


_NCCL_DEFAULTS = {
    ("NCCL_SOCKET_IFNAME",): "=lo",  # where all ranks are on this machine nobody outside it need reach them
    ("NCCL_RAS_ENABLE",): "0",  # a service that tells of the ranks, on a port of its own
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "0",  # else a traceback is kept of every collective
}
"""Names of one variable, the present one first → what it is where the user sets none of them."""


def nccl_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """What NCCL and torch are to find in the environment besides what is there."""
    return {
        names[0]: value for names, value in _NCCL_DEFAULTS.items() if not any(name in environment for name in names)
    }


_REMEDY = (
    "NCCL_DEBUG=INFO in the environment has it say more. It needs a device for each rank, the loopback interface, or"
    " with several hosts that of the cluster (NCCL_SOCKET_IFNAME names another), and room in /dev/shm (docker run"
    " --shm-size=1g); workers={'backend': 'shared_memory'} does without NCCL"
)


class NcclCommunicator(ProcessGroupCommunicator):
    """CUDA collectives. Never run on a GPU: unmeasured.

    A collective is queued on the current stream and the host goes on. NCCL sums in an order and a precision of its own
    (16-bit floats as such), but each element in one place, so that all ranks hold the same bits. What hangs on the
    device cannot see the abort word: a thread watches it and aborts the process group, which ends the queued kernels.
    They end without an error, and what they leave means nothing: `why_void` says so.

    The ranks connect, and see that a sum is right, when the communicator is made and after each reset.

    Args:
        device: this rank's CUDA device. The others are those of ProcessGroupCommunicator.

    Raises:
        StartupError: NCCL cannot connect the ranks, or does not sum.
    """

    capturable = True

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: dist.Store,
        timeout: float,
        arena: Arena,
        place: int | None = None,
        *,
        device: torch.device,
    ) -> None:
        self._device = device
        self._closed = threading.Event()
        self._alive = threading.Lock()  # held while the group must not be aborted
        os.environ.update(nccl_defaults(os.environ))
        super().__init__(rank, world_size, store, timeout, arena, place)
        self._watcher = threading.Thread(target=self._watch, name="nccl-abort-watch", daemon=True)
        self._watcher.start()

    def _part(self, width: int) -> NcclCommunicator:
        return NcclCommunicator(*self._of_part(width), device=self._device)

    def sum(self, tensor: Tensor) -> Tensor:
        self._check_aborted()
        out = summable_in_place(tensor)
        if out.numel():
            self._sum_in_place(self._group, out.view(-1))
        return out

    def why_void(self) -> CollectiveAbortedError | None:
        return self._arena.abort_error() if self._arena.aborted else None

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        with self._alive:
            self._check_aborted()
            yield

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()
        super().close()

    def _new_group(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._timeout)
        total = torch.full((1,), self.rank + 1.0, device=self._device)
        try:
            with torch.cuda.device(self._device):
                group = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            self._sum_in_place(group, total)
            found = total.item()
        except RuntimeError as error:
            raise StartupError(f"NCCL cannot connect rank {self.rank} on {self._device}: {error}. {_REMEDY}") from error
        due = self.world_size * (self.world_size + 1) / 2
        if found != due:
            raise StartupError(f"NCCL sums to {found:g} on {self._device} where {due:g} is due. {_REMEDY}")
        return group

    def _sum_in_place(self, group: Any, tensor: Tensor) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, to which it need not come back from another
        _wait(group.allreduce([tensor], options))

    def _gather_into(self, parts: list[Tensor], data: Tensor) -> None:
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._group.allgather([parts], [data], options))

    def _abort_group(self) -> None:
        with self._alive:
            super()._abort_group()

    def _watch(self) -> None:
        aborted: Any = None
        while not self._closed.wait(WATCH_SECONDS):
            with self._alive:
                if self._arena.aborted and self._group is not aborted:
                    aborted = self._group
                    aborted.abort()


def _wait(work: Any) -> None:
    """Wait for a synchronous collective. NCCL returns no work for one: it is on the current stream already."""
    if work is not None:
        work.wait()
