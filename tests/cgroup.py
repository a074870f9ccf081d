"""A memory limit for single processes, where the system lets us set one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOTS = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}  # versions 1 and 2


@contextlib.contextmanager
def memory_limit(pid: int, nbytes: int) -> Iterator[bool]:
    """From now on, let a process take this many bytes more; beyond that the kernel's memory killer ends it.

    Args:
        pid: the process, which must have ended when the block is left.
        nbytes: its further allowance.

    Returns:
        Whether the system lets us.
    """
    for root, name in _ROOTS.items():
        group = Path(root, f"parallelformers_ng-{os.getpid()}-{pid}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if _limit(group / name, nbytes) and _limit(group / "cgroup.procs", pid):
                yield True
                return
        finally:
            group.rmdir()
    yield False


def _limit(file: Path, value: int) -> bool:
    try:
        file.write_text(str(value))
    except OSError:
        return False
    return True
