"""NCCL between the ranks of a machine, and its environment."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import summable_in_place
from parallelformers_ng.collectives.process_group import ProcessGroupCommunicator
from parallelformers_ng.errors import CollectiveAbortedError, StartupError

WATCH_SECONDS = 0.02
ENTRY_SECONDS = 0.25
"""How long a rank takes at most from its look at the abort word to NCCL's own locks. Who has not come back from there
by then waits for a peer."""
SETTLE_SECONDS = 0.1
"""How much later than another a rank may fail for the same reason."""

_NCCL_DEFAULTS = {
    ("NCCL_SOCKET_IFNAME",): "=lo",  # all ranks are on this machine: nobody outside need reach them
    ("NCCL_RAS_ENABLE",): "0",  # a service that tells of the ranks, on a port of its own
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "0",  # else a traceback is kept of every collective
    # Torch would wait a minute for traces after an error, and end the process, which can go on: the group watches it.
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"): "0",
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",): "0",
    ("TORCH_NCCL_ENABLE_MONITORING",): "0",  # it ends the process too, when the thread that waits as above seems stuck
}
"""Names of one variable, the present one first → its value if the user sets none of them."""


def nccl_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the additions to the environment for NCCL and torch."""
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
    (16-bit floats stay so). Each element is summed in one place, so all ranks hold the same bits. A kernel that hangs
    on the device cannot see the abort word. A thread watches it and aborts the process group, and that ends the queued
    kernels. They end without an error, and their results mean nothing: see `why_void`.

    An abort does not return before all recordings that have collectives of the group are destroyed, and a collective
    waits for the same lock of torch meanwhile (`commDestroySync` of NCCL's init.cc; `ProcessGroupNCCL::abortComms`). So
    nobody queues a collective once an abort may have begun, and recordings go as soon as the request has ended. An
    error that all ranks meet after the same collectives needs no abort.

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
        self._entering = threading.Lock()  # held between a look at the abort word and the return from NCCL
        self._ending = threading.Lock()  # held while a group is aborted
        self._ended: Any = None  # the group that was aborted last
        self._trace = 0  # differs, but for chance, if other collectives were queued in this request
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
            with self._queueing(out.nbytes):
                self._sum_in_place(self._group, out.view(-1))
        return out

    def why_void(self) -> CollectiveAbortedError | None:
        return self._arena.abort_error() if self._arena.aborted else None

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        self._check_aborted()
        self._note(0)
        yield

    def note_end(self, sequence: int) -> None:
        self._arena.note_end(self._place, sequence, self._trace)
        self._trace = 0

    def all_ended(self, sequence: int) -> bool:
        if self._parts or not self._owns_arena or self.world_size != self._arena.world_size:
            return False  # what ranks of stages queued is not the same
        own, begun = self._trace, time.monotonic()
        self.note_end(sequence)
        while not self._arena.aborted and time.monotonic() - begun < SETTLE_SECONDS:
            ends = [self._arena.end(place) for place in range(self.world_size)]
            traces = {trace for ended, trace in ends if ended == sequence}
            if traces != {own}:
                return False
            if all(ended == sequence for ended, _ in ends):
                return True
            time.sleep(0.0005)
        return False

    def close(self) -> None:
        self._closed.set()
        self.clear_up()  # for which an abort that has begun waits
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
            result = total.item()
        except RuntimeError as error:
            raise StartupError(f"NCCL cannot connect rank {self.rank} on {self._device}: {error}. {_REMEDY}") from error
        due = self.world_size * (self.world_size + 1) / 2
        if result != due:
            raise StartupError(f"NCCL sums to {result:g} on {self._device} where {due:g} is due. {_REMEDY}")
        return group

    def _sum_in_place(self, group: Any, tensor: Tensor) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, to which it need not come back from another
        group.allreduce([tensor], options)  # returns no work to wait for

    def _gather_into(self, whole: Tensor, own: Tensor) -> None:
        options = AllgatherOptions()
        options.asyncOp = False
        with self._queueing(-whole.nbytes):
            self._group._allgather_base(whole, own, options)

    @contextlib.contextmanager
    def _queueing(self, kind: int) -> Iterator[None]:
        """Around a collective that is queued: no abort begins before NCCL has it.

        Args:
            kind: a number that tells it from others.

        Raises:
            CollectiveAbortedError: an abort may have begun.
        """
        while not self._entering.acquire(timeout=WATCH_SECONDS):
            self._check_aborted()
        try:
            self._check_aborted()
            self._note(kind)
            yield
        except BaseException:
            self._trace = -1 - self.rank  # like no other rank's
            raise
        finally:
            self._entering.release()

    def _note(self, kind: int) -> None:
        self._trace = (self._trace * 1000003 + kind + 1) & 0xFFFFFFFF

    def _abort_group(self) -> None:
        with self._ending:
            if self._ended is not self._group:
                self._ended = self._group
                super()._abort_group()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            if self._arena.aborted and self._ended is not self._group:
                # Who looked at the word before it was set is past torch's lock after this, or waits for a peer there.
                if self._entering.acquire(timeout=ENTRY_SECONDS):
                    self._entering.release()
                self._abort_group()
