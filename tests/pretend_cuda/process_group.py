"""gloo under the name of NCCL."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.pretend_cuda.tensor import DeviceTensor

_POLL_SECONDS = 0.0005


class PretendedWork:
    """A collective. As NCCL's, one whose group was aborted ends like any other, with whatever is in its tensors."""

    def __init__(self, group: ProcessGroupNCCL, work: Any) -> None:
        self._group = group
        self._work = work

    def is_completed(self) -> bool:
        return self._group.aborted or self._work.is_completed()

    def wait(self, timeout: timedelta | None = None) -> bool:
        while not self.is_completed():
            time.sleep(_POLL_SECONDS)
        if not self._group.aborted:
            self._work.wait()
        return True


class ProcessGroupNCCL:
    """What the package asks of torch's class of this name. Ranks meet in the first collective, as they do there."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self._timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, options._timeout
        self._gloo: Any = None
        self.aborted = False

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> PretendedWork:
        return PretendedWork(self, self._connected().allreduce(_hosts(tensors), options or dist.AllreduceOptions()))

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> PretendedWork:
        return PretendedWork(self, self._connected().allgather(list(map(_hosts, outputs)), _hosts(inputs)))

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connected()

    def abort(self) -> None:
        self.aborted = True

    def _connected(self) -> Any:
        if self.aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        if self._gloo is None:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
            options._timeout = self._timeout
            self._gloo = dist.ProcessGroupGloo(self._store, self._rank, self._size, options)
        return self._gloo


def _hosts(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor):
            raise ValueError(f"Tensors must be CUDA and dense, and this one is on {tensor.device}")
    return [tensor.host for tensor in tensors]
