"""Runs ranks as threads of one process, to prove a plan on a tiny model without starting workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from parallelformers_ng.collectives.communicator import Communicator, sum_in_rank_order
from parallelformers_ng.errors import CollectiveAbortedError

T = TypeVar("T")


class _Meeting:
    """An all-gather between threads: each rank stores an item, waits at a barrier, and reads all ranks' items."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout)
        self.left: list[Any] = [None] * world_size
        self.timeout, self.ended = timeout, False

    def end(self) -> None:
        """Record that a rank has ended, so that the other ranks raise CollectiveAbortedError instead of waiting."""
        self.ended = True
        if self.barrier.n_waiting:
            self.barrier.abort()

    def exchange(self, rank: int, item: T) -> list[T]:
        if self.ended:
            self.barrier.abort()
        try:
            self.left[rank] = item
            self.barrier.wait()
            items = list(self.left)
            self.barrier.wait()
        except threading.BrokenBarrierError:
            reason = "ended without it" if self.ended else "raised an error or did not come within the timeout"
            raise CollectiveAbortedError(f"rank {rank}: waited for a collective, but another rank {reason}") from None
        return items


class ThreadCommunicator(Communicator):
    """A communicator between threads. Sums are computed in rank order, as on every CPU backend.

    A sum is a new tensor; the input does not change.
    """

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        super().__init__(rank, world_size)
        self._meeting = meeting

    def _part(self, width: int) -> ThreadCommunicator:
        meetings = self._meeting.exchange(self.rank, _Meeting(width, self._meeting.timeout))
        first = self.rank - self.rank % width  # a stage needs one common `_Meeting`: that of its first rank
        return ThreadCommunicator(self.rank - first, width, meetings[first])

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._meeting.exchange(self.rank, tensor.detach().clone())
        return sum_in_rank_order(parts, out=torch.empty_like(parts[0]))

    def gather(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        return torch.cat(self._meeting.exchange(self.rank, tensor.detach()), dim=dim)

    def abort(self, reason: str) -> None:
        self._meeting.barrier.abort()
        for part in self._parts.values():
            part.abort(reason)

    def close(self) -> None:
        self._meeting.end()
        super().close()


def run_ranks(world_size: int, body: Callable[[Communicator], T], timeout: float = 60.0) -> list[T]:
    """Run `body(communicator)` in one thread for each rank, and return the results in rank order."""
    meeting = _Meeting(world_size, timeout)

    def run(rank: int) -> T:
        communicator = ThreadCommunicator(rank, world_size, meeting)
        try:
            result = body(communicator)
        except BaseException as error:
            communicator.abort(str(error))
            raise
        communicator.close()
        return result

    with ThreadPoolExecutor(world_size, "rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    raised = [error for error in (future.exception() for future in futures) if error is not None]
    if raised:
        raise next((error for error in raised if not isinstance(error, CollectiveAbortedError)), raised[0])
    return [future.result() for future in futures]
