"""Reads the CPU and memory limits of this process's Linux control groups, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


def cpu_quota() -> float | None:
    """Return the smallest quota, in CPUs, of this process's control groups and their parents; None without a quota.

    The quota is `cpu.max` of version 2, or `cpu.cfs_quota_us` of version 1. The formats are those of the kernel's
    documents `admin-guide/cgroup-v2.rst` and `scheduler/sched-bwc.rst`.
    """
    quotas = [_quota_of(directory) for directory in _directories("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_left() -> int | None:
    """Return the bytes that this process may still use under the memory limits of its control groups and their parents.

    File pages that the kernel can drop count as free. Without a limit, the result is None. The limit is `memory.max` of
    version 2, or `memory.limit_in_bytes` of version 1 (the kernel's documents `admin-guide/cgroup-v2.rst` and
    `admin-guide/cgroup-v1/memory.rst`).
    """
    free_bytes = [_left_in(directory) for directory in _directories("memory")]
    return min((size for size in free_bytes if size is not None), default=None)


def _directories(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control groups with a controller, such as "cpu". A group comes before its
    parent."""
    for controllers, path in own_groups():
        if controllers and controller not in controllers.split(","):
            continue
        base = _ROOT / controllers if controllers else _ROOT
        directory = base / path.lstrip("/")
        yield from (each for each in (directory, *directory.parents) if each.is_relative_to(base))


def own_groups() -> list[tuple[str, str]]:
    """Return the control groups of this process, as (controllers, path); empty if `/proc/self/cgroup` cannot be read.

    Controllers are separated by commas; version 2 has "" instead. The format is that of cgroups(7).
    """
    lines = kernel_text("/proc/self/cgroup").splitlines()
    return [(fields[1], fields[2]) for line in lines if len(fields := line.split(":", 2)) == 3]


def _quota_of(directory: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        words = " ".join(kernel_text(directory / name) for name in names).split()
        if len(words) == 2 and words[0] not in ("max", "-1"):
            return int(words[0]) / int(words[1])
    return None


def _left_in(directory: Path) -> int | None:
    for limit_name, usage_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = kernel_text(directory / limit_name), kernel_text(directory / usage_name)
        if limit.isdigit() and usage.isdigit():
            lines = (line.split() for line in kernel_text(directory / "memory.stat").splitlines())
            droppable = (f"{prefix}inactive_file", f"{prefix}active_file")
            free = sum(int(words[1]) for words in lines if words[0] in droppable)
            return max(0, int(limit) - int(usage) + free)
    return None


def kernel_text(file: str | Path) -> str:
    """Return the text of a kernel file; "" if the file cannot be read."""
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""
