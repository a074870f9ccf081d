"""Collectives of CUDA tensors by way of host memory: slow, but they ask nothing of the devices."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallelformers_ng.collectives.communicator import Communicator, summable_in_place
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator


class StagedCommunicator(Communicator):
    """Copies each tensor to the host, exchanges it there through shared memory, and copies the result back.

    For several ranks on one device, which NCCL refuses by design, so that the CUDA path can be checked with a single
    GPU. Never run on a GPU: unmeasured.

    Args:
        host: the communicator that exchanges host tensors.
    """

    def __init__(self, host: SharedMemoryCommunicator) -> None:
        super().__init__(host.rank, host.world_size)
        self._host = host

    def all_reduce(self, tensor: Tensor) -> Tensor:
        target = summable_in_place(tensor)
        return target.copy_(self._host.all_reduce(target.cpu()))

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        return self._host.all_gather(tensor.detach().cpu(), dim, sizes).to(tensor.device)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        return tensor.copy_(self._host.broadcast(tensor.detach().cpu(), src))

    def barrier(self) -> None:
        self._host.barrier()

    def abort(self, reason: str) -> None:
        self._host.abort(reason)

    def reset(self) -> None:
        self._host.reset()

    def cancel_sequence(self) -> int:
        return self._host.cancel_sequence()

    def close(self) -> None:
        self._host.close()
