"""Finds out which lines of code ranks are running, also for ranks in C code or waiting for other ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from parallelformers_ng.collectives.control_groups import kernel_text
from parallelformers_ng.runtime.worker_process import Worker

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
    answer within a second."""
    logs = [worker.request_traceback() for worker in workers]
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


def report(workers: Sequence[Worker], arena: Any) -> str:
    """Describe each rank: state of its process, steps of collectives, running method, and innermost stack frames. A
    rank with fewer steps than its peers is late."""
    # Read the states first, because `collect` may continue stopped processes.
    states = [_state(worker, arena, worker.rank - workers[0].rank) for worker in workers]
    lines = []
    for worker, state, frames in zip(workers, states, collect(workers), strict=True):
        words = [f"pid {worker.pid}", state, *_activity(frames)]
        lines.append(f"rank {worker.rank} ({', '.join(words)}):{'' if frames else ' no traceback'}")
        inner = [frame for frame in frames if frame.function not in _EVERY_MODULE]
        lines += [f"  {each.file}, line {each.line}, in {each.function}" for each in inner[:_MAX_FRAMES]]
    return "\n".join(lines)


def status_of(pid: object, field: str) -> str:
    """Return a field of `/proc/PID/status`; "" if there is no such process."""
    return kernel_text(f"/proc/{pid}/status").partition(f"\n{field}:\t")[2].partition("\n")[0]


def _state(worker: Worker, arena: Any, place: int) -> str:
    if worker.host_name is not None:
        return f"on host {worker.host_name}"
    state = status_of(worker.pid, "State")
    if not state:
        return "ended"
    places = place, arena.world_size + place  # a rank counts collectives of its group and of its pipeline stage apart
    steps = sum(map(arena.counter, places))
    last = " and ".join(filter(None, map(arena.last_collective, places)))
    return f"{state}, {steps} steps of collectives, the last {last}" if steps else state


def _activity(frames: Sequence[StackFrame]) -> list[str]:
    """Describe, from its stack frames, whether a rank runs a method, waits for a request, or answers one."""
    place_of = {each.function: number for number, each in enumerate(frames) if each.file.endswith("runtime/service.py")}
    if "_run" in place_of:
        return [f"runs {frames[place_of['_run'] - 1].function!r}"]
    return ["waits for a request"] if "_next" in place_of else ["reads or answers a request"] * ("serve" in place_of)
