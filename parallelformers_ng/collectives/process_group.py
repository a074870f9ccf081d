"""What the communicators on top of torch.distributed have in common.

They make a process group object of their own: the default group, the environment variables and the ports stay free
for the program. The ranks meet through a file.
"""

from __future__ import annotations

import os
import stat
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelformers_ng.collectives.arena_map import ArenaMap
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import CollectiveAbortedError, GroupError


def create_rendezvous() -> int:
    """A descriptor of an empty anonymous file for the ranks to meet in: it has no name, so nobody else finds it, and
    nothing is left on disk however the processes end. The caller closes it, and passes it to every rank."""
    return os.memfd_create("parallelformers_ng-rendezvous", os.MFD_CLOEXEC)


def rendezvous_path(fd: int) -> str:
    """The path under which this process, and its user's others, open a rendezvous as long as `fd` is open here."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_store(rendezvous: str, world_size: int) -> dist.Store:
    """The store at a rendezvous path.

    Raises:
        GroupError: the folder of the path is open to other users, who could then steer the group.
    """
    folder = os.path.dirname(os.path.abspath(rendezvous))
    found = os.stat(folder)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise GroupError(
            f"rendezvous: folder {folder} has mode {stat.S_IMODE(found.st_mode):#o} and owner {found.st_uid}; it must "
            f"be 0o700 and belong to user {os.geteuid()}: take a path from rendezvous_path()"
        )
    return dist.FileStore(rendezvous, world_size)


class ProcessGroupCommunicator(Communicator):
    """A communicator on a c10d process group.

    Args:
        rank, world_size: as everywhere.
        store: where the ranks meet.
        timeout: how long a rank waits for a peer, in seconds.
        arena: carries the abort and cancel words; None leaves only the timeout.
    """

    def __init__(self, rank: int, world_size: int, store: dist.Store, timeout: float, arena: ArenaMap | None) -> None:
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

    def all_gather(self, tensor: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        dim, sizes = self._gather_sizes(tensor, dim, sizes)
        longest = max(sizes)
        if tensor.shape[dim] < longest:  # the backends want equal parts
            shape = list(tensor.shape)
            shape[dim] = longest
            padded = tensor.new_zeros(shape)
            padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.detach())
            tensor = padded
        parts = self._gather(tensor, "all_gather")
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        self._check_src(src)
        self._check_aborted()
        data = tensor.detach().contiguous()
        if data.numel():
            options = dist.BroadcastOptions()
            options.rootRank = src
            self._finish(self._group.broadcast([data.reshape(-1).view(torch.uint8)], options), "broadcast")
        if data.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(data)
        return tensor

    def abort(self, reason: str) -> None:
        if self._arena is not None:
            self._arena.abort(self.rank, reason)

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
        if self._arena is not None and self._arena.aborted:
            raise self._arena.abort_error()

    def _poll(self, work: Any, operation: str) -> None:
        """Waits on the host, with an eye on the abort word."""
        start = time.monotonic()
        while not work.is_completed():
            self._check_aborted()
            waited = time.monotonic() - start
            if waited > self._timeout:
                self._give_up(f"rank {self.rank}: {operation} did not end within {self._timeout:g} s")
            if waited < 1e-3:
                os.sched_yield()
            else:
                time.sleep(min(waited / 8, 0.5e-3))
        try:
            work.wait()
        except RuntimeError as error:  # a peer's connection broke
            self._give_up(f"rank {self.rank}: {operation} failed: {error}", error)

    def _give_up(self, reason: str, cause: Exception | None = None) -> None:
        self.abort(reason)
        raise CollectiveAbortedError(reason) from cause
