"""Limits the memory of processes, file pages included, by Linux control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOTS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # versions 1 and 2
_USED = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}
_PEAK = {"memory.limit_in_bytes": "memory.max_usage_in_bytes", "memory.max": "memory.peak"}


class Group:
    """A control group with a memory limit. Beyond the limit, the kernel kills a process of the group. If the system
    forbids control groups, all methods do nothing.

    Args:
        path: directory of the group; "" if the system forbids control groups.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None
        self._limit = next((name for name in _USED if self.path and (self.path / name).exists()), "")

    def join(self, pid: int = 0) -> None:
        """Move a process into the group, by default the calling process."""
        if self.path:
            (self.path / "cgroup.procs").write_text(str(pid or os.getpid()))

    def used(self) -> int:
        """Return the memory that the group uses, in bytes."""
        return int((self.path / _USED[self._limit]).read_text()) if self.path else 0

    def limit_to(self, nbytes: int) -> None:
        """Limit the memory of the group to `nbytes` from now on."""
        if self.path:
            (self.path / self._limit).write_text(str(nbytes))

    def peak(self) -> int:
        """Return the peak of the group's memory, in bytes."""
        return int((self.path / _PEAK[self._limit]).read_text()) if self.path else 0


@contextmanager
def control_group(name: str) -> Iterator[str]:
    """Make a control group for the block. Yields its path, "" if the system forbids control groups. All processes of
    the group must end before the block ends."""
    for root, limit in _ROOTS.items():
        path = Path(root, f"parallelformers_ng-{os.getpid()}-{name}")
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            yield str(path) if (path / limit).exists() else ""
        finally:
            path.rmdir()
        return
    yield ""


@contextmanager
def memory_limit(pid: int, nbytes: int) -> Iterator[bool]:
    """Limit the further memory of a process to `nbytes` from now on. The process must not be in another group.

    Args:
        pid: process id; the process must end before the block ends.

    Yields:
        Whether the system permits the limit.
    """
    with control_group(str(pid)) as path:
        group = Group(path)
        group.limit_to(nbytes)  # memory from before does not count
        group.join(pid)
        yield bool(path)
