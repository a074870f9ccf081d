"""Divides the CPUs of this process among the ranks."""

from __future__ import annotations

import os
from pathlib import Path

from parallelformers_ng.collectives.control_groups import cpu_quota

_NODES = Path("/sys/devices/system/node")


def usable_cpus() -> int:
    """Return how many CPUs' worth of time this process may use: its affinity, or its control group's quota if that is
    less.

    A container with `--cpus=4` on a machine of 64 sees all 64; with a thread on each, it would be stopped for most of
    every period.
    """
    available = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return available if quota is None else max(1, min(available, round(quota)))


def cpus_of_ranks(world_size: int, threads: int) -> list[set[int]] | None:
    """Return the CPUs of each rank, or None if the scheduler should place them.

    Ranks are pinned only where all of them together take every CPU that there is to have: a rank that leaves CPUs to
    others could find them on its own. Neighbours in the list share a NUMA node wherever the counts allow.

    Args:
        world_size: number of ranks.
        threads: number of threads of each rank.
    """
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // world_size
    if threads != each or usable_cpus() < len(cpus):  # also where each is 0: more ranks than CPUs
        return None
    nodes = numa_nodes(_NODES)
    cpus.sort(key=lambda cpu: (nodes.get(cpu, 0), cpu))
    return [set(cpus[rank * each : (rank + 1) * each]) for rank in range(world_size)]


def numa_nodes(directory: Path) -> dict[int, int]:
    """CPU → its NUMA node; empty where the system tells of none, or where this process may open no more files."""
    node_of: dict[int, int] = {}
    try:
        lists = [(node, (node / "cpulist").read_text()) for node in directory.glob("node[0-9]*")]
    except OSError:
        return node_of
    for node, text in lists:
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            if first:
                node_of.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(node.name[4:])))
    return node_of
