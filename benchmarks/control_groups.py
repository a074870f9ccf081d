"""Control groups of memory: what some processes may have together, file pages included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOTS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # versions 1 and 2
_USED = {"memory.limit_in_bytes": "memory.usage_in_bytes", "memory.max": "memory.current"}
_PEAK = {"memory.limit_in_bytes": "memory.max_usage_in_bytes", "memory.max": "memory.peak"}


class Group:
    """A control group of memory; beyond its limit the kernel's memory killer ends a process of it. None of it happens
    where the system forbids groups.

    Args:
        path: its directory; "" if there is none.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None
        self._limit = next((name for name in _USED if self.path and (self.path / name).exists()), "")

    def join(self, pid: int = 0) -> None:
        """Have a process in it, by default this one."""
        if self.path:
            (self.path / "cgroup.procs").write_text(str(pid or os.getpid()))

    def used(self) -> int:
        """Bytes."""
        return int((self.path / _USED[self._limit]).read_text()) if self.path else 0

    def limit_to(self, nbytes: int) -> None:
        """From now on no more than so many bytes."""
        if self.path:
            (self.path / self._limit).write_text(str(nbytes))

    def peak(self) -> int:
        """The most that it has used, in bytes."""
        return int((self.path / _PEAK[self._limit]).read_text()) if self.path else 0


@contextmanager
def control_group(name: str) -> Iterator[str]:
    """The path of a new one, "" if none can be made. What is in it must have ended when the block is left."""
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
    """From now on, let a process, which is in no other group, take this many bytes more.

    Args:
        pid: the process, which must have ended when the block is left.

    Returns:
        Whether the system lets us.
    """
    with control_group(str(pid)) as path:
        group = Group(path)
        group.limit_to(nbytes)  # what the process had before is not counted
        group.join(pid)
        yield bool(path)
