"""Runs collectives over NCCL between the ranks of one host, and sets NCCL's environment variables."""

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

from parallelformers_ng.collectives.communicator import summable
from parallelformers_ng.collectives.process_group import ProcessGroupCommunicator
from parallelformers_ng.collectives.small_sums import SmallSums, proven_small_sums
from parallelformers_ng.errors import CollectiveAbortedError, StartupError

WATCH_SECONDS = 0.02
# A call of NCCL that takes longer than this is waiting for another rank.
ENTRY_SECONDS = 0.25
END_SECONDS = 2.0  # at the end of the group, kernels of `SmallSums` wait this long for other ranks
SETTLE_SECONDS = 0.1  # if all ranks fail for the same reason, the last rank fails within this time

# Names of an environment variable, new name first → value that this package sets if the user has set neither name.
_NCCL_DEFAULTS = {
    ("NCCL_SOCKET_IFNAME",): "=lo",  # all ranks are on one machine, so loopback is enough
    ("NCCL_RAS_ENABLE",): "0",  # NCCL's status service would open a port
    ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"): "0",  # or torch records each traceback
    # By default torch ends the process a minute after an error of NCCL, but the group handles such errors itself.
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"): "0",
    ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",): "0",
    ("TORCH_NCCL_ENABLE_MONITORING",): "0",  # torch's monitor would end a process whose watchdog seems stuck
}


def nccl_defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables to add for NCCL and torch; variables in `environment` keep their values."""
    return {names[0]: value for names, value in _NCCL_DEFAULTS.items() if environment.keys().isdisjoint(names)}


_REMEDY = (
    "Set NCCL_DEBUG=INFO to see NCCL's log. NCCL needs a device for each rank, free space in /dev/shm (docker run"
    " --shm-size=1g), and the loopback interface, or with several hosts the cluster's interface (set"
    " NCCL_SOCKET_IFNAME for another interface). workers={'backend': 'shared_memory'} avoids NCCL"
)


class NcclCommunicator(ProcessGroupCommunicator):
    """A communicator for CUDA ranks over NCCL. It ran with two and three ranks on one card, never on two cards.

    A collective is queued on the current stream, and the host continues at once. NCCL chooses the order of a sum, and
    sums 16-bit floats in 16 bits. Each element is summed in one place, so all ranks get the same bits. On one host,
    `SmallSums` sums tensors of less than 256 KiB if the devices can read each other's memory, after a trial.

    A hanging kernel cannot read the arena's abort word. So a thread watches the abort word and aborts the process
    group, which ends the queued kernels. Such kernels end without an error, and their results are wrong: see
    `why_void`.

    An abort waits until all CUDA graphs with collectives of the group are destroyed. Meanwhile a new collective would
    wait for the same lock of torch (`commDestroySync` of NCCL's init.cc; `ProcessGroupNCCL::abortComms`). So no
    collective is queued after an abort may have begun, and the graphs are destroyed as soon as the request has ended.
    An error that all ranks raise after the same collectives needs no abort.

    When the communicator is created, and after each reset, the ranks connect, check one sum, and test `SmallSums`,
    unless an earlier test of it failed. The constructor adds `nccl_defaults` to the environment of the process. The
    arguments `membership` are those of ProcessGroupCommunicator.
    """

    capturable = True

    def __init__(self, *membership: Any, device: torch.device, is_on_one_host: bool = True) -> None:
        self._device = device
        self._is_on_one_host = is_on_one_host
        self._small: SmallSums | None = None
        self._may_try_small = True  # False after a failed trial, so that a reset does not repeat the trial
        self._closed = threading.Event()
        self._entering = threading.Lock()  # held while a collective is queued, so that no abort begins then
        self._ending = threading.Lock()  # held while a process group is aborted, so that it is aborted once
        self._ended: Any = None  # the process group that was aborted last, because a group must be aborted only once
        self._trace = 0  # hash of this request's collectives, which all ranks compare after an error
        os.environ.update(nccl_defaults(os.environ))
        super().__init__(*membership)
        self._watcher = threading.Thread(target=self._watch, name="nccl-abort-watch", daemon=True)
        self._watcher.start()
        self._try_small_sums()

    def _part(self, width: int) -> NcclCommunicator:
        return NcclCommunicator(*self._of_part(width), device=self._device, is_on_one_host=self._is_on_one_host)

    def sum(self, tensor: Tensor) -> Tensor:
        self._check_aborted()
        out = summable(tensor)
        if out.numel():
            with self._queueing(out.nbytes):
                if self._small is not None and self._small.can_sum(out):
                    self._small.sum(out.view(-1))
                else:
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
            return False  # pipeline stages queue different collectives, so traces differ
        own, begun = self._trace, time.monotonic()
        self.note_end(sequence)
        while not self._arena.aborted and time.monotonic() - begun < SETTLE_SECONDS:
            ends = [self._arena.end(place) for place in range(self.world_size)]
            if {trace for ended, trace in ends if ended == sequence} != {own}:
                return False
            if all(ended == sequence for ended, _ in ends):
                return True
            time.sleep(0.0005)
        return False

    def reset(self) -> None:
        small, self._small = self._small, None
        if small is not None:
            small.limit(0)
        super().reset()
        if small is not None:
            small.close()
        with contextlib.suppress(CollectiveAbortedError):  # the next request will raise the error
            self._try_small_sums()

    def close(self) -> None:
        self._closed.set()
        small, self._small = self._small, None
        if small is not None:
            small.limit(END_SECONDS)
        self.clear_up()  # an abort that has begun waits until the CUDA graphs are destroyed
        self._watcher.join()
        if small is not None:
            self._abort_group()
            small.close()
        super().close()

    def _try_small_sums(self) -> None:
        if self._is_on_one_host and self.world_size > 1:
            store, may_try = self._new_store(), self._may_try_small
            small = proven_small_sums(self, store, self._device, lambda: self._arena.aborted, may_try)
            if not self._arena.aborted:
                self._small, self._may_try_small = small, small is not None
            elif small is not None:  # after an abort, the ranks may disagree, so a reset repeats the trial
                small.close()

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
        expected = self.world_size * (self.world_size + 1) / 2
        if result != expected:
            raise StartupError(f"NCCL sums to {result:g} on {self._device} instead of {expected:g}. {_REMEDY}")
        return group

    def _sum_in_place(self, group: Any, tensor: Tensor) -> None:
        options = dist.AllreduceOptions()
        options.asyncOp = False  # on the current stream, a sum needs no synchronization
        group.allreduce([tensor], options)  # no `wait`, because later work is on the same stream

    def _gather_into(self, whole: Tensor, own: Tensor) -> None:
        options = AllgatherOptions()
        options.asyncOp = False
        with self._queueing(-whole.nbytes):
            self._group._allgather_base(whole, own, options)

    @contextlib.contextmanager
    def _queueing(self, kind: int) -> Iterator[None]:
        """Context in which NCCL queues a collective: no abort begins inside, and the collective is added to the trace.

        Args:
            kind: number for the trace, equal for equal collectives.
        """
        while not self._entering.acquire(timeout=WATCH_SECONDS):
            self._check_aborted()
        try:
            self._check_aborted()
            self._note(kind)
            yield
        except BaseException:
            self._trace = -1 - self.rank  # differs on each rank, so that `all_ended` returns False
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
                # Give a collective that is just being queued time to finish. One that takes longer waits for another
                # rank, and only the abort ends it.
                if self._entering.acquire(timeout=ENTRY_SECONDS):
                    self._entering.release()
                self._abort_group()
