"""Provides the target that ranks on several hosts run in tests."""

from __future__ import annotations

import time

import torch

from tests.helpers.runtime_target import Target


class HostsTarget(Target):
    def collect(self) -> list[torch.Tensor]:
        """Return one result of each kind of collective."""
        rank, communicator = self.rank, self.communicator
        return [
            communicator.all_reduce(torch.full((2, 2), rank + 1.0).t()),
            communicator.all_reduce(torch.full((70000,), 0.1 * rank, dtype=torch.bfloat16)),
            communicator.all_gather(torch.full((2, rank + 1), rank), -1, sizes=[1, 2, 3]),
            communicator.broadcast(torch.full((2,), rank), src=2),
            communicator.all_reduce(torch.tensor([rank == 1, False])),
            communicator.all_reduce(torch.empty(0)),
        ]

    def diverge(self) -> None:
        self.communicator.all_reduce(torch.zeros(3 if self.rank else 5))

    def emit_and_sleep(self, seconds: float) -> None:
        self.emit("here")
        time.sleep(seconds)
