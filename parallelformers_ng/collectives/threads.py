"""Ranks as threads of one process: for proving a plan on a tiny model without starting a worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import CollectiveAbortedError

T = TypeVar("T")


class _Meeting:
    """Where the threads leave their tensors: every rank puts one down, waits for all, and looks at them."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.barrier_ = threading.Barrier(world_size, timeout=timeout)
        self.left: list[Any] = [None] * world_size
        self.ended = False

    def end(self) -> None:
        """A rank will not come again: whoever waits for it is let go."""
        self.ended = True
        if self.barrier_.n_waiting:
            self.barrier_.abort()

    def exchange(self, rank: int, item: T) -> list[T]:
        if self.ended:
            self.barrier_.abort()
        try:
            self.left[rank] = item
            self.barrier_.wait()
            seen = list(self.left)
            self.barrier_.wait()
        except threading.BrokenBarrierError:
            reason = "ended without it" if self.ended else "raised, or did not come within the timeout"
            raise CollectiveAbortedError(f"rank {rank}: waited for a collective, and another rank {reason}") from None
        return seen


class ThreadCommunicator(Communicator):
    """Collectives between threads. Sums are taken in rank order, as in every backend."""

    def __init__(self, rank: int, world_size: int, meeting: _Meeting) -> None:
        super().__init__(rank, world_size)
        self._meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._meeting.exchange(self.rank, tensor.detach().clone())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        dim, _ = self._gather_sizes(tensor, dim, sizes)
        return torch.cat(self._meeting.exchange(self.rank, tensor.detach()), dim=dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        return tensor.copy_(self._meeting.exchange(self.rank, tensor.detach().clone())[src])

    def barrier(self) -> None:
        self._meeting.exchange(self.rank, None)

    def abort(self, reason: str) -> None:
        self._meeting.barrier_.abort()

    def reset(self) -> None:
        self._meeting.barrier_.reset()


def run_ranks(world_size: int, body: Callable[[Communicator], T], timeout: float = 60.0) -> list[T]:
    """Run `body(communicator)` on `world_size` ranks, each a thread, and return their results in rank order.

    Args:
        timeout: seconds that a rank waits for the others in a collective.

    Raises:
        Exception: the first exception of a rank that was not merely left waiting by another's.
    """
    meeting = _Meeting(world_size, timeout)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def run(rank: int) -> None:
        communicator = ThreadCommunicator(rank, world_size, meeting)
        try:
            results[rank] = body(communicator)
            meeting.end()
        except BaseException as error:  # handed to the caller below
            errors[rank] = error
            communicator.abort(str(error))

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise next((error for error in raised if not isinstance(error, CollectiveAbortedError)), raised[0])
    return results
