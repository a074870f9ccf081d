"""Tests the choice of the ranks' CPUs, on machines that are described by files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from parallelformers_ng.collectives import control_groups
from parallelformers_ng.runtime import cores


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a machine with eight CPUs, even ones on node 0, odd ones on node 1, without a quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "_NODES", tmp_path / "node")
    monkeypatch.setattr(control_groups, "_ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "own_groups", lambda: [("", "/app/worker")])
    for node, cpus in (("node0", "0,2,4,6\n"), ("node1", "1,3,5,7\n")):
        (tmp_path / "node" / node).mkdir(parents=True)
        (tmp_path / "node" / node / "cpulist").write_text(cpus)
    (tmp_path / "cgroup" / "app" / "worker").mkdir(parents=True)
    return tmp_path


def test_ranks_divide_all_cpus_within_nodes(machine: Path) -> None:
    assert cores.usable_cpus() == 8
    assert cores.cpus_of_ranks(2, 4) == [{0, 2, 4, 6}, {1, 3, 5, 7}]
    assert cores.cpus_of_ranks(4, 2) == [{0, 2}, {4, 6}, {1, 3}, {5, 7}]
    assert cores.cpus_of_ranks(3, 2) == [{0, 2}, {4, 6}, {1, 3}]


def test_ranks_are_pinned_only_when_using_all_cpus(machine: Path) -> None:
    assert cores.cpus_of_ranks(2, 1) is None
    assert cores.cpus_of_ranks(2, 5) is None
    assert cores.cpus_of_ranks(9, 1) is None


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 8), ("250000 100000", 2), ("1000 100000", 1)])
def test_quota_counts_at_any_level(machine: Path, limit: str, expected: int) -> None:
    (machine / "cgroup" / "app" / "cpu.max").write_text(limit + "\n")
    assert cores.usable_cpus() == expected
    assert (cores.cpus_of_ranks(2, 4) is None) == (expected < 8)


def test_a_quota_of_version_1(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_groups, "own_groups", lambda: [("memory", "/a"), ("cpu,cpuacct", "/a")])
    group = machine / "cgroup" / "cpu,cpuacct" / "a"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("300000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.usable_cpus() == 3


def test_node_lists_with_ranges(tmp_path: Path) -> None:
    for node, cpus in (("node0", "0-2,6"), ("node1", ""), ("node12", "3-5")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus + "\n")
    assert cores.numa_nodes(tmp_path) == {0: 0, 1: 0, 2: 0, 6: 0, 3: 12, 4: 12, 5: 12}
    assert cores.numa_nodes(tmp_path / "nowhere") == {}
