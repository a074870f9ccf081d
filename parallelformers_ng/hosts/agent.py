"""Runs the agent of a host: a process that starts, controls and ends the host's ranks for the caller of a group.

The agent connects to the caller over TCP, connects each rank to the caller, and connects the host's first rank to the
first ranks of other hosts. The ranks then use the connections directly, so messages do not pass through the agent.
For its ranks the agent acts as the caller on a single host: `runtime` uses the same shared memory, fork server and
lifelines, and the kernel ends the ranks with the agent.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parallelformers_ng.errors import ChannelClosedError, ParallelError, ProtocolError, RequestTimeoutError
from parallelformers_ng.runtime import startup
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.spawn import poll_of
from parallelformers_ng.wire.frame import FileDescriptor, FrameKind
from parallelformers_ng.wire.meeting import Address, Listener, call
from parallelformers_ng.wire.signed import Session, SignedChannel
from parallelformers_ng.worker.preload import warm_up

CHECK_SECONDS = 0.2  # interval between checks whether the missing processes can still connect
_WATCH_SECONDS = 0.05  # interval between checks whether a rank has aborted the collectives
_GOODBYE_SECONDS = 2.0  # ranks of a group that ended normally are killed after this time

# Versions that must be equal on all hosts, because modules that are pickled on one host are unpickled on the others.
VERSIONS = {"Python": platform.python_version()} | {name: metadata.version(name) for name in ("torch", "transformers")}

Connection = tuple[socket.socket, Session]


def machine() -> str:
    """Return the boot id, which tells whether two processes run on the same machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def purpose(what: str, number: int, token: bytes) -> bytes:
    """Return the text that tells an accepting process what a new connection is for: a rank of the group, or the
    "leader" (first rank) of a host, with the number of the rank or host."""
    return f"{what} {number} {token.hex()}".encode()


def accept_each(
    listener: Listener, due: Mapping[bytes, int], deadline: float, check: Callable[[], object] = bool
) -> dict[int, Connection]:
    """Accept all expected connections, and return them by number. Other connections are closed.

    Args:
        due: expected connections: text of `purpose` → number in the result.
        check: function that is called a few times each second; raises an error if waiting has become useless.
    """
    connections: dict[int, Connection] = {}
    while len(connections) < len(due):
        try:
            caller, connection = listener.accept(min(deadline, time.monotonic() + CHECK_SECONDS))
        except RequestTimeoutError:
            if time.monotonic() >= deadline:
                missing = [" ".join(name.decode().split()[:2]) for name in due if due[name] not in connections]
                raise RequestTimeoutError(f"{', '.join(missing)} did not connect in time") from None
            check()
            continue
        if caller in due and due[caller] not in connections:
            connections[due[caller]] = connection
        else:
            connection[0].close()
    return connections


def serve(link: Connection, address: Address, key: bytes, number: int, name: str = "") -> None:
    """Start and control the ranks of one group on this host until the group or its caller has ended.

    `link` is the connection to the caller, which gets the error if ranks cannot be started. The function closes it.
    """
    connection, session = link
    control = SignedChannel(connection, session)
    listener = Listener(connection.getsockname()[0], key)
    with (
        contextlib.closing(control),
        contextlib.closing(listener),
        contextlib.suppress(ChannelClosedError, ProtocolError),  # the caller closes the connection to end the group
    ):
        warm_up()
        hello = {
            "name": name or socket.gethostname(),
            "machine": machine(),
            "versions": VERSIONS,
            "listens": list(listener.address),
            "devices": torch.cuda.device_count(),
        }
        control.send(FrameKind.EVENT, 0, hello)
        _, _, order = control.recv()
        with contextlib.closing(_Agent(address, key, number, control, listener, order)) as agent:
            agent.run()


@dataclass(eq=False)
class _Agent:
    """Starts, controls and ends the ranks of one group on this host, as the caller commands."""

    _address: Address
    _key: bytes
    _number: int
    _control: SignedChannel
    _listener: Listener
    _order: dict[str, Any]
    _ended: int = 0
    _resets: int = 0
    _abort_reported: bool = False
    _processes: Processes | None = None

    def __post_init__(self) -> None:
        self._here, self._token = self._listener.address[0], self._order["token"]
        self._counts: list[int] = self._order["counts"]
        self._count = self._counts[self._number]

    def run(self) -> None:
        try:
            processes = self._start()
        except (ParallelError, OSError) as error:
            self._control.send(FrameKind.ERROR, 0, str(error))
            return
        self._control.send(FrameKind.READY, 0, [worker.pid for worker in processes.workers])
        self._watch(processes)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.end(_GOODBYE_SECONDS if self._ended == self._count else 0.0)

    def _start(self) -> Processes:
        settings, device = self._order["settings"], self._order["device"]
        # The ranks of this host use the devices 0, 1, 2, … that are visible to this process (CUDA_VISIBLE_DEVICES).
        names = [device if device == "cpu" else f"{device}:{index}" for index in range(self._count)]
        deadline = time.monotonic() + settings.start_timeout
        self._arena = startup.create_arena(self._count)
        processes = self._processes = Processes(self._arena, names)
        with contextlib.ExitStack() as opened:
            links = self._links(deadline, opened) if len(self._counts) > 1 else None
            spans = []
            first = sum(self._counts[: self._number])
            for index in range(self._count):
                connection = call(self._address, self._key, purpose("rank", first + index, self._token), deadline)
                connections = {"caller": _for_rank(connection, opened), "links": None if index else links}
                spans.append({"counts": self._counts, "number": self._number, "address": self._here, **connections})
            wait = startup.launch(processes, settings, names, (0, self._count), spans)
        wait()
        return processes

    def _links(self, deadline: float, opened: contextlib.ExitStack) -> dict[int, tuple[Any, ...]]:
        """Connect the first rank of this host to the first ranks of all other hosts; return host number → connection.
        The host connects to hosts with lower numbers, and accepts connections from hosts with higher numbers."""
        links: dict[int, tuple[Any, ...]] = {}
        own_purpose = purpose("leader", self._number, self._token)
        for other, address in enumerate(self._order["listeners"][: self._number]):
            links[other] = _for_rank(call(tuple(address), self._key, own_purpose, deadline), opened)
        due = {purpose("leader", other, self._token): other for other in range(self._number + 1, len(self._counts))}
        for other, connection in accept_each(self._listener, due, deadline).items():
            links[other] = _for_rank(connection, opened)
        self._listener.close()
        return links

    def _watch(self, processes: Processes) -> None:
        """Carry out the caller's commands, and report to the caller each rank that ends or aborts the collectives."""
        commands: dict[str, Callable[..., object]] = {
            "abort": self._arena.abort,
            "cancel": self._arena.request_cancel,
            "kill": processes.kill,
            "reset": self._reset,
        }
        running = {worker.pidfd: worker for worker in processes.workers}
        poll = poll_of([self._control.fileno(), *running])
        while True:
            ready = [fd for fd, _ in poll.poll(_WATCH_SECONDS * 1000)]
            for worker in [running.pop(fd) for fd in ready if fd in running]:
                poll.unregister(worker.pidfd)
                self._arena.abort(f"rank {worker.rank} ended")
                self._ended += 1
                self._control.send(FrameKind.EVENT, 0, ["ended", worker.rank, worker.exit_status()])
            if self._arena.aborted and not self._abort_reported:
                self._abort_reported = True
                if not self._arena.aborted_by_parent:
                    self._control.send(FrameKind.EVENT, 0, ["aborted", self._resets, str(self._arena.abort_error())])
            while self._control.fileno() in ready or self._control.has_more:
                _, _, (word, *values) = self._control.recv()
                ready = []
                if word not in commands:
                    raise ProtocolError(f"the caller sent the unknown command {word!r}")
                commands[word](*values)

    def _reset(self) -> None:
        self._arena.reset()
        self._resets, self._abort_reported = self._resets + 1, False
        self._control.send(FrameKind.EVENT, 0, ["reset"])


def _for_rank(link: Connection, opened: contextlib.ExitStack) -> tuple[FileDescriptor, bytes, bytes]:
    """Convert a connection to the tuple that a rank receives: (descriptor, key for sending, key for receiving).

    This process closes its own descriptor when `opened` closes.
    """
    connection, session = link
    connection.setblocking(True)
    opened.callback(connection.close)
    return FileDescriptor(connection.fileno()), session.sending, session.receiving
