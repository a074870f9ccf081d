"""Defines the base class of communicators over torch.distributed, and the gloo communicator for CPU ranks.

Each communicator creates its own process group object. So the program can still use torch's default group, its
environment variables and its ports. The ranks meet through a file.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import ArenaCommunicator, sum_in_rank_order, summable
from parallelformers_ng.errors import CollectiveAbortedError


def create_rendezvous() -> int:
    """Return the descriptor of a new empty file without a name, through which torch's `FileStore` connects the ranks.

    Other programs cannot open the file, and a crash leaves nothing on disk. The caller must close the descriptor when
    the group ends.
    """
    return os.memfd_create("parallelformers_ng-rendezvous", os.MFD_CLOEXEC)


def rendezvous_path(fd: int) -> str:
    """Return a path by which processes of the same user can open the file `fd`, while this process keeps `fd` open."""
    return f"/proc/{os.getpid()}/fd/{fd}"


class ProcessGroupCommunicator(ArenaCommunicator):
    def __init__(
        self, rank: int, world_size: int, store: dist.Store, timeout: float, arena: Arena, place: int | None = None
    ) -> None:
        super().__init__(rank, world_size, arena, place)
        self._store = store
        self._timeout = timeout
        self._generation = 0
        self._group = self._new_group(self._new_store())

    @abstractmethod
    def _new_group(self, store: dist.Store) -> Any: ...

    @abstractmethod
    def _gather_into(self, whole: Tensor, own: Tensor) -> None:
        """Write every rank's bytes `own` to `whole`, in rank order. On CUDA the bytes may arrive after the call."""

    def _of_part(self, width: int) -> tuple[int, int, dist.Store, float, Arena, int]:
        store = dist.PrefixStore(f"stage {self.rank // width} of {width}", self._store)
        return self.rank % width, width, store, self._timeout, self._arena, self.rank

    def _abort_group(self) -> None:
        self._group.abort()

    def _new_store(self) -> dist.Store:
        return dist.PrefixStore(str(self._generation), self._store)

    def _gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors as `[world_size, *shape]`. Shape and dtype must be equal on all ranks.

        The tensors are sent as bytes, because no backend supports every dtype.
        """
        self._check_aborted()
        own = tensor.detach().contiguous()
        whole = own.new_empty((self.world_size, *own.shape))
        if own.numel():
            self._gather_into(whole.view(-1).view(torch.uint8), own.view(-1).view(torch.uint8))
        return whole

    def gather(self, tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
        longest = max(sizes)
        if tensor.shape[dim] < longest:  # backends need equal sizes on all ranks, so pad the tensor
            shape = list(tensor.shape)
            shape[dim] = longest
            padded = tensor.new_zeros(shape)
            padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.detach())
            tensor = padded
        parts = self._gather(tensor)
        if dim == 0 and min(sizes) == longest:  # `torch.cat` would copy tensors that are adjacent already
            return parts.flatten(0, 1)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def clear_up(self) -> None:
        for action in self._before_reset:
            action()

    def reset(self) -> None:
        self.clear_up()
        self._abort_group()
        self._generation += 1
        self._group = self._new_group(self._new_store())
        super().reset()

    def close(self) -> None:
        if self._group is not None:
            self.clear_up()
            self._abort_group()
            self._group = None
        super().close()

    def _check_aborted(self) -> None:
        if self._arena.aborted:
            raise self._arena.abort_error()


class GlooCommunicator(ProcessGroupCommunicator):
    """A communicator for CPU ranks over loopback sockets.

    Between 2 ranks, a sum in shared memory was 122 times faster for 8 KiB and 15 times faster for 256 KiB
    (`benchmarks/results/decode.md`).
    """

    def _part(self, width: int) -> GlooCommunicator:
        return GlooCommunicator(*self._of_part(width))

    def sum(self, tensor: Tensor) -> Tensor:
        # Gloo's own sum uses another order. Summing gathered parts in rank order gives the same bits as shared memory.
        out = summable(tensor)
        return sum_in_rank_order(self._gather(out).unbind(), out=out)

    def _new_group(self, store: dist.Store) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing from the stub
        # All ranks are on one machine, so the variable GLOO_SOCKET_IFNAME must not select another interface.
        options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
        options._timeout = timedelta(seconds=self._timeout)
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def _gather_into(self, whole: Tensor, own: Tensor) -> None:
        work, start = self._group._allgather_base(whole, own), time.monotonic()
        while not work.is_completed():
            self._check_aborted()
            waited = time.monotonic() - start
            if waited > self._timeout:
                self._give_up(f"rank {self._place}: a gather over gloo did not end within {self._timeout:g} s")
            if waited < 0.002:
                os.sched_yield()
            else:
                time.sleep(min(waited / 8, 0.0005))
        try:
            work.wait()
        except RuntimeError as error:  # the connection to another rank broke
            self._give_up(f"rank {self._place}: a gather over gloo failed: {error}", error)

    def _give_up(self, reason: str, cause: Exception | None = None) -> None:
        self.abort(reason)
        raise CollectiveAbortedError(reason) from cause
