"""The agent: what stands on a host for the caller of a group. It starts the host's ranks, steers them and ends them.

It calls the caller over TCP, connects each rank to the caller, and connects the first rank to the first ranks of other
hosts. Then it hands these connections over: the ranks' messages do not pass through it. To its ranks it is the caller
of a single host, so `runtime` works as there: shared memory, the process that forks ranks, and the pipes by which the
kernel ends them with the agent.
"""

from __future__ import annotations

import contextlib
import platform
import select
import socket
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parallelformers_ng.errors import ChannelClosedError, ParallelError, ProtocolError
from parallelformers_ng.runtime import startup
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.wire.frame import FileDescriptor, FrameKind
from parallelformers_ng.wire.meeting import Address, Listener, call
from parallelformers_ng.wire.signed import Session, SignedChannel
from parallelformers_ng.worker.preload import warm_up

_WATCH_SECONDS = 0.05  # between two looks at whether a rank has aborted
_GOODBYE_SECONDS = 2.0

VERSIONS = {"Python": platform.python_version()} | {name: metadata.version(name) for name in ("torch", "transformers")}
"""What must be the same on all hosts: a model's modules cross pickled."""


def machine() -> str:
    """Return an id of this machine since its start."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def purpose(what: str, number: int, token: bytes) -> bytes:
    """Return the purpose of a connection of a group."""
    return f"{what} {number} {token.hex()}".encode()


def serve(link: tuple[socket.socket, Session], address: Address, key: bytes, number: int, name: str = "") -> None:
    """Serve one group until it ends, or its caller is gone.

    Args:
        link: connection to the caller; its purpose is `host NUMBER`.
        address: address at which the caller listens.
        key: the group's key.
        number: number of this host in the group.
        name: name of this host in errors; by default, its own name.
    """
    connection, session = link
    control = SignedChannel(connection, session)
    listener = Listener(connection.getsockname()[0], key)
    try:
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
    except (ChannelClosedError, ProtocolError):
        return  # the group has ended, or its caller is gone
    finally:
        listener.close()
        control.close()


class _Agent:
    """One group's ranks on this host. The arguments are those of `serve`, and

    Args:
        control: to the caller.
        listener: listener for agents of other hosts.
        order: the caller's order for the start.
    """

    def __init__(
        self,
        address: Address,
        key: bytes,
        number: int,
        control: SignedChannel,
        listener: Listener,
        order: dict[str, Any],
    ) -> None:
        self._address, self._key, self._number = address, key, number
        self._control = control
        self._listener, self._here = listener, listener.address[0]
        self._order = order
        self._token: bytes = order["token"]
        self._counts: list[int] = order["counts"]
        self._first = sum(self._counts[:number])
        self._count = self._counts[number]
        self._ended: set[int] = set()
        self._resets = 0
        self._told_abort = False
        self._processes: Processes | None = None

    def run(self) -> None:
        """Start the ranks, then do as the caller says until it hangs up."""
        try:
            processes = self._start()
        except (ParallelError, OSError) as error:
            self._control.send(FrameKind.ERROR, 0, str(error))
            return
        self._control.send(FrameKind.READY, 0, [worker.pid for worker in processes.workers])
        self._watch(processes)

    def close(self) -> None:
        """End the ranks."""
        if self._processes is not None:
            self._processes.end(_GOODBYE_SECONDS if len(self._ended) == self._count else 0.0)

    def _start(self) -> Processes:
        order, device = self._order, self._order["device"]
        # The first rank here has the first of the devices that this process sees, and so on.
        names = [device if device == "cpu" else f"{device}:{index}" for index in range(self._count)]
        deadline = time.monotonic() + order["start_timeout"]
        self._arena = startup.create_arena(self._count)
        processes = self._processes = Processes(self._arena, names)
        with contextlib.ExitStack() as opened:
            links = self._links(deadline, opened) if len(self._counts) > 1 else None
            spans = []
            for index in range(self._count):
                connection = call(self._address, self._key, purpose("rank", self._first + index, self._token), deadline)
                own = {"caller": _handed(connection, opened), "links": None if index else links}
                spans.append({"counts": self._counts, "number": self._number, "address": self._here, **own})
            wait = startup.launch(
                processes,
                self._arena,
                target=order["target"],
                imports=order["imports"],
                device_names=names,
                backend=order["backend"],
                timeout=order["timeout"],
                start_timeout=order["start_timeout"],
                threads=order["threads"],
                among=(0, self._count),
                spans=spans,
            )
        wait()
        return processes

    def _links(self, deadline: float, opened: contextlib.ExitStack) -> dict[int, tuple[Any, ...]]:
        """Connections to the leaders of the other hosts: this one calls those before it and is called by the others."""
        links: dict[int, tuple[Any, ...]] = {}
        mine = purpose("leader", self._number, self._token)
        for other, address in enumerate(self._order["listeners"][: self._number]):
            links[other] = _handed(call(tuple(address), self._key, mine, deadline), opened)
        due = {purpose("leader", other, self._token): other for other in range(self._number + 1, len(self._counts))}
        while due:
            said, connection = self._listener.accept(deadline)
            if said in due:
                links[due.pop(said)] = _handed(connection, opened)
            else:
                connection[0].close()
        self._listener.close()
        return links

    def _watch(self, processes: Processes) -> None:
        """Do what the caller says; tell it when a rank ends or aborts."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        running = {worker.pidfd: worker for worker in processes.workers}
        for fd in running:
            poll.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(_WATCH_SECONDS * 1000)]
            for worker in [running.pop(fd) for fd in ready if fd in running]:
                poll.unregister(worker.pidfd)
                self._arena.abort(f"rank {worker.rank} ended")
                self._ended.add(worker.rank)
                self._control.send(FrameKind.EVENT, 0, ["ended", worker.rank, *worker.exit_status()])
            if self._arena.aborted and not self._told_abort:
                self._told_abort = True
                if not self._arena.aborted_by_parent:
                    self._control.send(FrameKind.EVENT, 0, ["aborted", self._resets, str(self._arena.abort_error())])
            while self._control.fileno() in ready or self._control.has_more:
                _, _, (word, *values) = self._control.recv()
                ready = []
                self._obey(processes, word, values)

    def _obey(self, processes: Processes, word: str, values: list[Any]) -> None:
        if word == "abort":
            self._arena.abort(*values)
        elif word == "cancel":
            self._arena.request_cancel(*values)
        elif word == "reset":
            self._arena.reset()
            self._resets, self._told_abort = self._resets + 1, False
            self._control.send(FrameKind.EVENT, 0, ["reset"])
        elif word == "kill":
            processes.kill()
        else:
            raise ProtocolError(f"the caller said {word!r}, which means nothing here")


def _handed(link: tuple[socket.socket, Session], opened: contextlib.ExitStack) -> tuple[FileDescriptor, bytes, bytes]:
    """Return a connection in a form in which a rank gets it; this process has it open as long as `opened` is."""
    connection, session = link
    connection.setblocking(True)
    opened.callback(connection.close)
    return FileDescriptor(connection.fileno()), session.sending, session.receiving
