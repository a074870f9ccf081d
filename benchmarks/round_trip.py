"""Measures the time of a call without work, on one and on two workers, compared with the least possible time.

    python -m benchmarks.round_trip [calls]

The peer's workers send JSON in fixed frames over socket pairs, and spin before they sleep, like ours. The peer has no
deadlines, no descriptors, no tensors and no checks. Our group and the peer take turns in one run. A raw pipe, with one
byte in each direction between two processes, shows the lower limit set by the scheduler.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import select
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from parallelformers_ng.runtime.cores import cpus_of_ranks, usable_cpus
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.wire.transport import SPIN_SECONDS

_TURNS = 10
_WARM_UP = 50
_FRAME = struct.Struct("<4sBBHQIQI")
_SPAWN = multiprocessing.get_context("spawn")


class Nothing:
    """A worker's target without work, for our group and for the peer."""

    def __init__(self, *_: Any) -> None:
        pass

    def nothing(self) -> None:
        """Return at once."""


class Peer:
    """A minimal caller with workers, on the same CPUs as our workers. Call `close` at the end."""

    def __init__(self, world_size: int) -> None:
        cpus = cpus_of_ranks(world_size, max(1, usable_cpus() // world_size)) or [None] * world_size
        self._sockets: list[socket.socket] = []
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            arguments = (theirs, cpus[rank], rank < usable_cpus() - 1)
            _SPAWN.Process(target=_serve, args=arguments, daemon=True).start()
            theirs.close()
            self._sockets.append(ours)
        self._polls = [_poll(connection) for connection in self._sockets]

    def call(self) -> None:
        """Send an empty request to all workers, and wait for all answers."""
        frame = _frame({"method": "nothing", "args": (), "kwargs": {}})
        for connection in self._sockets:
            connection.send(frame)
        for connection, poll in zip(self._sockets, self._polls, strict=True):
            _spin(poll)
            _read(connection.recv(4096))

    def close(self) -> None:
        """End the workers."""
        for connection in self._sockets:
            connection.close()


def _serve(connection: socket.socket, cpus: set[int] | None, spins: bool) -> None:
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    target, poll = Nothing(), _poll(connection)
    while True:
        if spins:
            _spin(poll)
        if not (data := connection.recv(4096)):
            return
        request = _read(data)
        result = getattr(target, request["method"])(*request["args"], **request["kwargs"])
        connection.send(_frame({"result": result}))


def _frame(message: Any) -> bytes:
    body = json.dumps(message).encode()
    return _FRAME.pack(b"peer", 1, 1, 0, 1, len(body), 0, 0) + body


def _read(data: bytes) -> Any:
    _FRAME.unpack_from(data)
    return json.loads(data[_FRAME.size :])


def _poll(connection: socket.socket) -> select.poll:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return poll


def _spin(poll: select.poll) -> None:
    until = time.monotonic() + SPIN_SECONDS
    while not poll.poll(0):
        if time.monotonic() > until:
            poll.poll()
            return
        os.sched_yield()


def _echo(connection: Connection) -> None:
    while data := connection.recv_bytes():
        connection.send_bytes(data)


def _report(contestants: dict[str, Callable[[], object]], calls: int) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(_TURNS):
        for name, call in contestants.items():
            for _ in range(_WARM_UP):
                call()
            for _ in range(calls // _TURNS):
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
    for name, took in seconds.items():
        print(f"{name:<28} min {min(took) * 1e6:7.1f} µs   median {statistics.median(took) * 1e6:7.1f} µs")


def main() -> None:
    """Measure our group, the peer and the pipe, and print the figures with the hardware."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {load:.1f}, Python {platform.python_version()}")
    ours, theirs = multiprocessing.Pipe()
    process = _SPAWN.Process(target=_echo, args=(theirs,), daemon=True)
    process.start()

    def pipe() -> None:
        ours.send_bytes(b"x")
        ours.recv_bytes()

    _report({"raw pipe, one process": pipe}, calls)
    for world_size in (1, 2):
        peer = Peer(world_size)
        with WorkerGroup(world_size, target="benchmarks.round_trip:Nothing") as group:
            contestants = {
                f"no-op call, {world_size} worker(s)": lambda group=group: group.call("nothing"),
                f"bare JSON, {world_size} worker(s)": peer.call,
            }
            _report(contestants, calls)
        peer.close()
    _report({"raw pipe, one process, again": pipe}, calls)
    ours.send_bytes(b"")
    process.join()


if __name__ == "__main__":
    main()
