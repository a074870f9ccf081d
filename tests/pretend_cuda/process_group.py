"""gloo under the name of NCCL."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelformers_ng.collectives.process_group import create_rendezvous, rendezvous_path
from tests.pretend_cuda.tensor import DeviceTensor

_POLL_SECONDS = 0.0005

MISHAP = "PRETENDED_NCCL_MISHAP"
"""The environment variable by which a group cannot connect ("raise"), or sums wrongly ("sum")."""

fail_next = False
"""Whether the next collective of this process fails."""

made = 0
"""How many groups this process has made."""


class ProcessGroupNCCL:
    """What the package asks of torch's class of this name. Ranks meet in the first collective, as they do there.

    Written after torch's `ProcessGroupNCCL.cpp`, whose synchronous collectives return no work since torch 2.8: they
    are on the current stream. `torch/distributed/distributed_c10d.py` therefore waits only for a work that is there
    ("Backward compatible with backends that don't sync at CPP level").
    """

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        global made
        made += 1
        self._store, self._rank, self._size, self._timeout = store, rank, size, options._timeout
        self._gloo: Any = None
        self._mishap = os.environ.get(MISHAP, "")
        self.aborted = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        hosts = _hosts(tensors)
        self._finish(self._connected(options).allreduce(hosts, options), hosts)
        if self._mishap == "sum":
            tensors[0].mul_(0.5)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> None:
        hosts = [_hosts(parts) for parts in outputs]
        self._finish(self._connected(options).allgather(hosts, _hosts(inputs)), hosts[0])

    def abort(self) -> None:
        self.aborted = True

    def _finish(self, work: Any, outputs: list[torch.Tensor]) -> None:
        """Wait for gloo. As NCCL's, a collective whose group was aborted ends like any other, with anything in its
        tensors."""
        while not (self.aborted or work.is_completed()):
            time.sleep(_POLL_SECONDS)
        if not self.aborted:
            work.wait()
            return
        for number, output in enumerate(outputs):
            output.fill_(17 * (number + 1))

    def _connected(self, options: Any) -> Any:
        global fail_next
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        if self._mishap == "raise":
            raise dist.DistBackendError("NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")
        if fail_next:
            fail_next = False
            raise dist.DistBackendError("NCCL error: remote process exited or there was a network error")
        assert not options.asyncOp, "a collective goes through a stream of its own"
        if self._gloo is None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = self._timeout
            store = dist.FileStore(self._unique_id(), self._size)
            self._gloo = dist.ProcessGroupGloo(store, self._rank, self._size, options)
        return self._gloo

    def _unique_id(self) -> str:
        """Where gloo's ranks meet. As with NCCL, the first one says so in the store, and it is all that goes there."""
        if self._rank == 0:
            self._meeting = create_rendezvous()  # open for as long as this process lives
            self._store.set("0", rendezvous_path(self._meeting))
            return rendezvous_path(self._meeting)
        return self._store.get("0").decode()


def _hosts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor):
            raise ValueError(f"Tensors must be CUDA and dense, and this one is on {tensor.device}")
    return [tensor.host for tensor in tensors]
