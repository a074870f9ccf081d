"""The places in which the tests of this folder run: one card over NCCL, and pretended devices.

Ranks share a card as NCCL and torch allow by name. `NCCL_MULTI_RANK_GPU_ENABLE` also lifts the library's refusal of a
device that is named twice. Before NCCL 2.30, each rank also needs a host id of its own: see `host_id.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from parallelformers_ng import start_group
from parallelformers_ng.model import groups
from parallelformers_ng.runtime.group import WorkerGroup

ABSENT = not torch.cuda.is_available() and "PARALLELFORMERS_TESTS_NEED_GPU" not in os.environ
ENVIRONMENT = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
RANKS = {
    "parallelformers_ng.worker.runner:ModelRunner": "tests.devices.one_card.ranks:ModelRunner",
    "tests.pretend_cuda.worker:PretendedRunner": "tests.devices.one_card.pretended_ranks:PretendedRunner",
}
"""Target of a group → target of a group whose ranks share a device."""

CARD = pytest.param("card", marks=[pytest.mark.gpu, pytest.mark.skipif(ABSENT, reason="needs a CUDA device")])
quick = pytest.mark.parametrize("place", [CARD, "pretended"], indirect=True)
"""Runs a test on a card, and always on a pretended device."""
slow = pytest.mark.parametrize("place", [CARD, pytest.param("pretended", marks=pytest.mark.slow)], indirect=True)
"""Runs a test on a card, and on a pretended device among the slow tests."""


@contextlib.contextmanager
def sharing_a_card() -> Iterator[None]:
    """Let several ranks share a device over NCCL in this context; their groups must start in it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setattr(groups, "RUNNER", RANKS[groups.RUNNER])
        yield


class Place:
    """One device for all ranks, and running groups on it.

    Attributes:
        is_real: whether the device is a card, and not a pretended device.
    """

    def __init__(self) -> None:
        self.is_real = "pretended" not in groups.RUNNER
        self._groups: dict[int, WorkerGroup] = {}

    def group(self, ranks: int) -> WorkerGroup:
        """Return a running group without a model, which the tests share; the start of a group takes seconds."""
        if ranks not in self._groups or not self._groups[ranks].alive:
            self._groups[ranks] = start_group(ranks, **self.workers(ranks))
        return self._groups[ranks]

    @staticmethod
    def workers(ranks: int, **more: Any) -> dict[str, Any]:
        """Return the options of workers of a test's own."""
        return {"device": "cuda", "device_ids": [0] * ranks, "timeout": 60, "start_timeout": 120, **more}

    def bytes_allocated(self, group: WorkerGroup) -> list[int]:
        """Return the bytes that each rank has allocated on the device."""
        return group.call_each("memory", [("allocated", name) for name in group.device_names])

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
