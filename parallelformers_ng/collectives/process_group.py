"""What the communicators on top of torch.distributed have in common.

They make a process group object of their own: the default group, the environment variables and the ports stay free
for the program. The ranks meet through a file.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import ArenaCommunicator
from parallelformers_ng.errors import CollectiveAbortedError


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
