"""Worker groups shared by all tests: starting one costs seconds, using one milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from parallelformers_ng import start_group
from parallelformers_ng.runtime.group import WorkerGroup

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def groups() -> Iterator[Callable[[int], WorkerGroup]]:
    """`groups(world_size)`: a running CPU group of that size, started on first use and again if a test ended it."""
    running: dict[int, WorkerGroup] = {}

    def get(world_size: int) -> WorkerGroup:
        if world_size not in running or not running[world_size].alive:
            running[world_size] = start_group(world_size, device="cpu", timeout=60)
        return running[world_size]

    yield get
    for group in running.values():
        group.close()
