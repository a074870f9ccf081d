"""Tests the memory report of each rank: bytes by device, and the tables for users."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml
import pytest
import torch

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.worker import memory
from parallelformers_ng.worker.memory import RankMemory
from tests.zoo.decoders import gpt2


def test_bytes_by_device_and_a_table_for_each(groups: Callable[[int], WorkerGroup]) -> None:
    with parallelize(gpt2(), workers=groups(2)) as model:
        weights = model.shard_plan.bytes_per_rank
        assert model.memory_allocated() == {"cpu:0": weights[0], "cpu:1": weights[1]}
        assert model.memory_reserved().keys() == {"cpu:0", "cpu:1"}
        assert all(size > weights[0] for size in model.memory_cached().values())
        lines = [f"CPU:{rank} => {size / 1e6:.2f}MB" for rank, size in enumerate(weights)]
        assert model.memory_summary(detail=False) == "\n".join(lines)
        table = model.memory_summary()
    assert all(f"worker {rank}" in table and lines[rank] in table for rank in range(2))
    assert {len(line) for line in table.splitlines() if line.startswith("|")} == {77}


def test_weight_bytes_are_known_without_reading_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked() -> Any:
        raise AssertionError("the pages of the process were counted")

    monkeypatch.setattr(memory, "proportional_set_size", looked)
    rank = RankMemory(torch.device("cpu"), "cpu:3", 2_720_000_000)
    assert rank.allocated() == 2_720_000_000
    assert rank.line() == "CPU:3 => 2.72GB"


@pytest.mark.parametrize("silent", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetMemoryInfo"])
def test_devices_without_nvml_data_give_empty_totals(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a device, or a device that the user may not read, causes no error."""

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    for name, value in (("Init", None), ("Shutdown", None), ("DeviceGetCount", 1), ("DeviceGetHandleByIndex", 0)):
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda *_, value=value: value)
    monkeypatch.setattr(pynvml, silent, refuse)
    assert memory.device_totals() == ""
