"""Collectives of CUDA tensors by way of host memory: slow, but they ask nothing of the devices."""

from __future__ import annotations

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
        self.cancel_sequence = host.cancel_sequence

    def sum(self, tensor: Tensor) -> Tensor:
        target = summable_in_place(tensor)
        return target.copy_(self._host.sum(target.cpu()))

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        return self._host.gather(tensor.detach().cpu(), dim, sizes).to(tensor.device)

    def abort(self, reason: str) -> None:
        self._host.abort(reason)

    def reset(self) -> None:
        self._host.reset()

    def close(self) -> None:
        self._host.close()
