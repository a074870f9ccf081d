"""Finds the ranks of another process from outside, in /proc. The process itself may hang, be stopped or be busy."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from parallelformers_ng.collectives.arena import WORLD_SIZE_WORD, Arena
from parallelformers_ng.collectives.control_groups import kernel_text
from parallelformers_ng.errors import GroupError
from parallelformers_ng.runtime.tracebacks import report, status_of
from parallelformers_ng.runtime.worker_process import Worker

_LOG = re.compile(r"/memfd:parallelformers_ng-rank-(\d+) ")
_ARENA = re.compile(r"/memfd:parallelformers_ng\.arena ")
_MAPPED = re.compile(r"(\d+) +/memfd:parallelformers_ng\.arena ")  # the inode number tells which arena is mapped


class ForeignRank(Worker):
    """A rank of another process of the same user. A stopped rank stays stopped, and so writes no traceback."""

    def __init__(self, pid: int, rank: int, log: Path) -> None:
        self.pid, self.rank, self._log = pid, rank, log

    def request_traceback(self) -> Callable[[], str]:
        size = len(self._written())
        # SIGUSR1 would end a process that has no handler yet.
        if int(status_of(self.pid, "SigCgt") or "0", 16) >> (signal.SIGUSR1 - 1) & 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGUSR1)
        return lambda: self._written()[size:].decode(errors="replace")

    def _written(self) -> bytes:
        with contextlib.suppress(OSError):  # the rank may have ended meanwhile
            return self._log.read_bytes()
        return b""


def reports_of(pid: int) -> list[str]:
    """Return a text about each group of a process, with a traceback of each rank; of ranks that have joined a group."""
    if not os.path.exists(f"/proc/{pid}"):
        raise GroupError(f"there is no process {pid}")
    try:
        arenas = {os.stat(file).st_ino: file for file, _ in _open_files(pid, _ARENA)}
    except PermissionError:
        raise GroupError(f"process {pid} cannot be inspected, because it belongs to another user") from None
    groups: dict[int, list[ForeignRank]] = defaultdict(list)
    for other in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        parent = status_of(other, "PPid")
        # A rank is a child of its caller, or of the caller's fork server.
        is_near = str(pid) in (parent, status_of(parent, "PPid"))
        mapped = _MAPPED.search(kernel_text(f"/proc/{other}/maps")) if is_near else None
        if mapped is not None and int(mapped[1]) in arenas:
            with contextlib.suppress(OSError, IndexError):  # the rank may have ended meanwhile
                file, log = _open_files(other, _LOG)[0]
                groups[int(mapped[1])].append(ForeignRank(other, int(log[1]), file))
    if not groups:
        raise GroupError(f"process {pid} has no groups of workers")
    return [_report(ranks, arenas[inode]) for inode, ranks in sorted(groups.items())]


def _report(ranks: list[ForeignRank], arena: Path) -> str:
    ranks.sort(key=lambda rank: rank.rank)
    with open(arena, "r+b") as file:
        world_size = int.from_bytes(os.pread(file.fileno(), 8, 8 * WORLD_SIZE_WORD), "little")
        text = report(ranks, Arena(file.fileno(), world_size))
    return f"{kernel_text(f'/proc/{ranks[0].pid}/cmdline').rstrip(chr(0))}\n{text}"


def _open_files(pid: int, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    files = []
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the process may have closed the file meanwhile
            if match := pattern.match(os.readlink(file)):
                files.append((file, match))
    return files
