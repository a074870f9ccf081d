"""Provides gloo under the name of NCCL."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelformers_ng.collectives.process_group import create_rendezvous, rendezvous_path
from tests.pretend_cuda import graphs
from tests.pretend_cuda.graphs import CUDAGraph
from tests.pretend_cuda.memory import key_of
from tests.pretend_cuda.streams import order
from tests.pretend_cuda.tensor import DeviceTensor, device_mode

_POLL_SECONDS = 0.0005

MISHAP = "PRETENDED_NCCL_MISHAP"
"""Environment variable that makes a group fail to connect ("raise"), sum wrongly ("sum"), or wait ("hang")."""

VERSION = (2, 28, 9)
"""Version of the pretended NCCL."""

fail_next = False
"""Whether the next collective of this process fails."""

groups_made = 0
"""Number of groups that this process has made."""


class ProcessGroupNCCL:
    """A stand-in for torch's class of the same name, with the methods that the package uses. Ranks meet in the first
    collective, as with NCCL.

    The stand-in follows torch's `ProcessGroupNCCL.cpp`. Since torch 2.8 its synchronous collectives return no work,
    because they run on the current stream. `torch/distributed/distributed_c10d.py` therefore waits only if a work is
    returned ("Backward compatible with backends that don't sync at CPP level").
    """

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        global groups_made
        groups_made += 1
        self._store, self._rank, self._size, self._timeout = store, rank, size, options._timeout
        self._gloo: Any = None
        self._mishap = os.environ.get(MISHAP, "")
        self._mutex = threading.Lock()
        self.graphs: weakref.WeakSet[CUDAGraph] = weakref.WeakSet()
        self.aborted = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        hosts = _hosts(tensors)
        self._queue(hosts, options, lambda gloo: gloo.allreduce(hosts, options))

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, options: Any) -> None:
        whole, own = _hosts([output, input])
        if whole.numel() != own.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        parts = [*whole.view(-1).split(own.numel())]
        self._queue([whole, own], options, lambda gloo: gloo.allgather([parts], [own.view(-1)]), [whole])

    def abort(self) -> None:
        """Abort, and return when no capture has collectives of this group, without a time limit."""
        with self._mutex:
            self.aborted = True
            while any(graph.has_collectives_of(self) for graph in self.graphs):
                time.sleep(_POLL_SECONDS)

    def _queue(
        self,
        hosts: list[torch.Tensor],
        options: Any,
        begin: Callable[[Any], Any],
        outputs: list[torch.Tensor] | None = None,
    ) -> None:
        assert not options.asyncOp, "a collective uses another stream than the current one"
        outputs = hosts if outputs is None else outputs
        with self._mutex:  # like getNCCLComm
            self._check()
        gloo = self._connected()

        def run() -> None:
            self._finish(begin(gloo), outputs)

        if graphs.capturing is not None:
            graphs.capturing.collective(self, hosts, run)
        else:
            run()
            order.queued(map(key_of, hosts), map(key_of, outputs), "a collective")

    def _finish(self, work: Any, outputs: list[torch.Tensor]) -> None:
        """Wait until gloo has finished.

        As with NCCL, a collective of an aborted group ends normally, with arbitrary values in its tensors.
        """
        while not (self.aborted or work.is_completed()) or self._mishap == "hang":
            time.sleep(_POLL_SECONDS)
        if not self.aborted:
            work.wait()
            if self._mishap == "sum":
                outputs[0].mul_(0.5)
            return
        for number, output in enumerate(outputs):
            output.fill_(17 * (number + 1))

    def _check(self) -> None:
        global fail_next
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        if self._mishap == "raise":
            raise dist.DistBackendError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")
        if fail_next:
            fail_next = False
            self._watchdog()
            raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")

    def _watchdog(self) -> None:
        """Act like NCCL's watchdog, in a separate thread, after NCCL has reported an error."""
        handling = _variable("ASYNC_ERROR_HANDLING", 3)
        if handling in (1, 3):
            seconds = 4 * _variable("WAIT_TIMEOUT_DUMP_MILSEC", 15000) / 1000
            end = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGABRT])
            end.daemon = True
            end.start()

    def _connected(self) -> Any:
        if self._gloo is None:
            self._refuse_shared_device()
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = self._timeout
            store = dist.FileStore(self._unique_id(), self._size)
            self._gloo = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        return self._gloo

    def _refuse_shared_device(self) -> None:
        """Raise if a rank with the same hash of its host has the same device, like `initTransportsRank` of `init.cc`.

        Ranks of simulated hosts are on one host, and their store has no counters: their devices are not compared.
        """
        is_on_one_host = "TORCH_NCCL_RANKS_PER_ROOT" not in os.environ
        is_allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and VERSION >= (2, 30)
        if is_on_one_host and not is_allowed:
            place = f"{os.environ.get('NCCL_HOSTID', 'this host')} cuda:{device_mode.current}"
            if self._store.add(place, 1) > 1:
                raise dist.DistBackendError(f"NCCL error: invalid usage. Duplicate GPU detected on {place}")

    def _unique_id(self) -> str:
        """Return the address at which gloo's ranks meet. As with NCCL, the first rank writes only this address to the
        store."""
        if self._rank == 0:
            self._meeting = create_rendezvous()  # stays open until this process ends
            self._store.set("0", rendezvous_path(self._meeting))
            return rendezvous_path(self._meeting)
        return self._store.get("0").decode()


def _variable(name: str, default: int) -> int:
    return int(os.environ.get(f"TORCH_NCCL_{name}", os.environ.get(f"NCCL_{name}", default)))


def _hosts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor):
            raise ValueError(f"Tensors must be CUDA and dense, and this one is on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
    return [tensor.host for tensor in tensors]
