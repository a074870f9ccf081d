"""Divides the CPUs of this process among the ranks."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from parallelformers_ng.collectives.control_groups import cpu_quota

_NODES = Path("/sys/devices/system/node")


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use: the smaller of its affinity and its control group's quota.

    A container with `--cpus=4` on a machine with 64 CPUs sees all 64. With 64 threads the kernel would stop the
    container for most of every scheduling period.
    """
    available = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return available if quota is None else max(1, min(available, round(quota)))


def threads_of_rank(ranks: int) -> int:
    return max(1, usable_cpus() // ranks)


def cpus_of_ranks(world_size: int, threads: int) -> list[set[int]] | None:
    """Return the CPU numbers to which each rank is pinned, or None if the kernel's scheduler should place the ranks.

    Ranks are pinned only if each rank has as many threads as its equal share of this process's CPUs, rounded down.
    Ranks are not pinned if a control group's quota allows fewer CPUs. With spare CPUs, the scheduler places ranks well.
    Ranks that are adjacent in the list share a NUMA node if the numbers of CPUs allow it.
    """
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // world_size
    # With more ranks than CPUs, `each` is 0 and differs from `threads`.
    if threads != each or usable_cpus() < len(cpus):
        return None
    nodes = numa_nodes(_NODES)
    cpus.sort(key=lambda cpu: (nodes.get(cpu, 0), cpu))
    return [set(cpus[rank * each : (rank + 1) * each]) for rank in range(world_size)]


def numa_nodes(directory: Path) -> dict[int, int]:
    """Return CPU number → NUMA node, from a folder like /sys/devices/system/node; empty without listed nodes."""
    node_of: dict[int, int] = {}
    with contextlib.suppress(OSError):  # no such folder, or too many open files
        for node in directory.glob("node[0-9]*"):
            for part in (node / "cpulist").read_text().strip().split(","):
                first, _, last = part.partition("-")
                if first:
                    node_of.update(dict.fromkeys(range(int(first), int(last or first) + 1), int(node.name[4:])))
    return node_of
