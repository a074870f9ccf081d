"""Tests that the stand-in for CUDA refuses two ranks on one device as NCCL and torch do, and what lifts the refusal."""

from __future__ import annotations

import os

import pytest

from parallelformers_ng import parallelize
from parallelformers_ng.errors import PlacementError, StartupError
from parallelformers_ng.model import groups
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker.preload import IMPORTS
from tests.devices.one_card.place import ENVIRONMENT, sharing_a_card
from tests.pretend_cuda.caller import TARGET, small


@pytest.fixture
def believing(pretended_one: WorkerGroup, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend devices; the other group keeps the fork server of the tests' groups."""
    return monkeypatch


def test_nccl_refuses_a_device_twice(believing: pytest.MonkeyPatch) -> None:
    """The pretended NCCL is older than 2.30, so its variable does not help."""
    believing.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    with pytest.raises(StartupError, match=r"Duplicate GPU detected on this host cuda:0"):
        WorkerGroup(2, "cuda", target=TARGET, imports=IMPORTS, device_ids=[0, 0], start_timeout=60)


@pytest.mark.parametrize("may_overlap", ["1", "0"])
def test_ranks_share_a_device_over_nccl(may_overlap: str, believing: pytest.MonkeyPatch) -> None:
    """Small sums read the memory of the same device, unless torch refuses that."""
    with sharing_a_card(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", may_overlap)
        with WorkerGroup(2, "cuda", target=groups.RUNNER, imports=IMPORTS, device_ids=[0, 0]) as group:
            (first,), (second,) = group.call_each("environment", [(["NCCL_HOSTID"],)])
            assert first != second
            lines, buffers = group.call("small_sums")
            assert bool(buffers) == (may_overlap == "1"), lines


def test_environment_is_restored(believing: pytest.MonkeyPatch) -> None:
    with sharing_a_card():
        assert {name: os.environ[name] for name in ENVIRONMENT} == ENVIRONMENT
        assert groups.RUNNER != TARGET
    assert not ENVIRONMENT.keys() & os.environ.keys()
    assert groups.RUNNER == TARGET
    with pytest.raises(PlacementError, match=r"device_ids \[0, 0\] name a device twice"):
        parallelize(small(), workers={"device": "cuda", "device_ids": [0, 0]})
