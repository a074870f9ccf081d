"""What a call costs before any work is done: a no-op on two workers, beside a raw pipe to one process.

    python -m benchmarks.round_trip [calls]

The pipe carries one byte each way between two processes and decodes nothing; it is the floor that the scheduler sets.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from parallelformers_ng.runtime.group import WorkerGroup


class Nothing:
    """The target of the measurement."""

    def __init__(self, *_: Any) -> None:
        pass

    def nothing(self) -> None:
        """Return at once."""


def _echo(connection: Connection) -> None:
    while data := connection.recv_bytes():
        connection.send_bytes(data)


def _report(name: str, call: Callable[[], object], calls: int) -> None:
    for _ in range(100):
        call()
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    print(f"{name:<28} min {min(seconds) * 1e6:7.1f} µs   median {statistics.median(seconds) * 1e6:7.1f} µs")


def main() -> None:
    """Measure and print both, with the hardware."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}, Python {platform.python_version()}")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_echo, args=(theirs,), daemon=True)
    process.start()

    def pipe() -> None:
        ours.send_bytes(b"x")
        ours.recv_bytes()

    _report("raw pipe, one process", pipe, calls)
    for world_size in (1, 2):
        with WorkerGroup(world_size, target="benchmarks.round_trip:Nothing") as group:
            _report(f"no-op call, {world_size} worker(s)", lambda group=group: group.call("nothing"), calls)
    _report("raw pipe, one process, again", pipe, calls)
    ours.send_bytes(b"")
    process.join()


if __name__ == "__main__":
    main()
