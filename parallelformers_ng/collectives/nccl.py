"""NCCL, for CUDA devices. Never run on a GPU: unmeasured."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import summable_in_place
from parallelformers_ng.collectives.process_group import ProcessGroupCommunicator

WATCH_SECONDS = 0.02


class NcclCommunicator(ProcessGroupCommunicator):
    """CUDA collectives. Never run on a GPU: unmeasured.

    A collective is queued on the current stream and the host goes on. NCCL sums in an order of its own, but each
    element in one place, so that all ranks hold the same bits. What hangs on the device cannot see the abort word:
    a thread watches it and aborts the process group, which ends the queued kernels.

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
