"""Finds out which lines of code ranks are running, also for ranks in C code or waiting for other ranks."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallelformers_ng.collectives.control_groups import kernel_text
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.worker_process import Worker, WorkerProcess

_ANSWER_SECONDS, _CHECK_SECONDS = 1.0, 0.02
_MAX_FRAMES = 12
_FRAME = re.compile(r'File "(?!<frozen )([^"]+)", line (\d+) in (.+)')  # a stack frame in the output of faulthandler
_EVERY_MODULE = frozenset({"_call_impl", "_wrapped_call_impl"})  # functions of torch that call every module's `forward`


class StackFrame(NamedTuple):
    file: str
    line: str
    function: str


def collect(workers: Sequence[Worker]) -> list[list[StackFrame]]:
    """Return each rank's stack frames, innermost first; an empty list if the rank is on another host, or does not
    answer within a second. A stopped process is continued."""
    logs = [
        functools.partial(worker.log_since, worker.request_traceback()) if isinstance(worker, WorkerProcess) else None
        for worker in workers
    ]
    end = time.monotonic() + _ANSWER_SECONDS
    return [[] if log is None else _frames(log, end) for log in logs]


def _frames(log: Callable[[], str], end: float) -> list[StackFrame]:
    text = previous = ""
    # A traceback has no end mark. It counts as complete when its text is the same at two checks.
    while time.monotonic() < end and not (text and text == previous):
        time.sleep(_CHECK_SECONDS)
        text, previous = log(), text
    # Any thread may have received the signal, so faulthandler writes all threads; the main thread comes last.
    return [StackFrame(*found) for found in _FRAME.findall(text.rpartition("\n\n")[2])]


def report(processes: Processes) -> str:
    """Describe each rank of a late request: state of its process, steps of collectives, and innermost stack frames. A
    rank with fewer steps than its peers is late."""
    # Read the states first, because `collect` continues stopped processes.
    states = [_state(worker, processes.arena) for worker in processes.workers]
    lines = []
    for worker, state, frames in zip(processes.workers, states, collect(processes.workers), strict=True):
        lines.append(f"rank {worker.rank} (pid {worker.pid}, {state}):{'' if frames else ' no traceback'}")
        inner = [frame for frame in frames if frame.function not in _EVERY_MODULE]
        lines += [f"  {each.file}, line {each.line}, in {each.function}" for each in inner[:_MAX_FRAMES]]
    return "\n".join(lines)


def _state(worker: Worker, arena: Any) -> str:
    if worker.host_name is not None:
        return f"on host {worker.host_name}"
    status = kernel_text(f"/proc/{worker.pid}/status")
    if not status:
        return "ended"
    # Steps in collectives of the whole group, and in those of the rank's stage.
    steps = arena.counter(worker.rank) + arena.counter(arena.world_size + worker.rank)
    state = status.partition("State:\t")[2].partition("\n")[0]
    return f"{state}, {steps} steps of collectives" if steps else state
