"""Represents hosts, and ranks on other hosts, in the caller's process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.errors import ChannelClosedError, RequestTimeoutError, StartupError
from parallelformers_ng.hosts.agent import VERSIONS
from parallelformers_ng.runtime.spawn import REAP_SECONDS
from parallelformers_ng.runtime.worker_process import Worker
from parallelformers_ng.wire.frame import FrameKind
from parallelformers_ng.wire.meeting import LOST_SECONDS
from parallelformers_ng.wire.signed import Session, SignedChannel
from parallelformers_ng.wire.transport import Channel

STEER_SECONDS = 10.0  # time limit for sending a command to an agent, and for its answer


@dataclass(eq=False)
class Host:
    """A host of a group, as the caller sees it.

    Attributes:
        pids: process ids of the host's ranks; empty until the ranks are ready.
        is_lost: whether the agent closed the connection or cannot be reached.
    """

    name: str
    control: SignedChannel
    machine: str
    listens: list[Any]
    pids: list[int] = field(default_factory=list)
    is_lost: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, connection: socket.socket, session: Session, devices: int, deadline: float) -> Host:
        control = SignedChannel(connection, session)
        _, _, hello = control.recv(deadline)
        for library, version in VERSIONS.items():
            if hello["versions"].get(library) != version:
                raise StartupError(
                    f"host {hello['name']} has {library} {hello['versions'].get(library)}, and this process has"
                    f" {version}; install the same version on all hosts, because modules are sent pickled"
                )
        if hello["devices"] < devices:
            raise StartupError(
                f"host {hello['name']} has {hello['devices']} CUDA devices for {devices} ranks; use fewer ranks per"
                " host, check whether CUDA_VISIBLE_DEVICES hides devices, or pass workers={'device': 'cpu'}"
            )
        return cls(hello["name"], control, hello["machine"], hello["listens"])

    def say(self, *words: Any) -> None:
        """Send a command and its arguments (`words`) to the agent; do nothing if it cannot be reached within 10 s."""
        with self.sending, contextlib.suppress(ChannelClosedError, RequestTimeoutError):
            if not self.is_lost:
                self.control.send(FrameKind.REQUEST, 0, list(words), time.monotonic() + STEER_SECONDS)


@dataclass(eq=False)
class RemoteWorker(Worker):
    """A rank on a host of `Hosts`, which an agent has started.

    Attributes:
        pidfd: eventfd in the place of a Linux pidfd; becomes readable when the rank has ended or its host is lost.
    """

    rank: int
    host: Host
    channel: Channel
    pid: int
    pidfd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    _code: int | None = None
    unknown_end = f"the host or its agent has ended, or sent nothing for {LOST_SECONDS} s"

    def __post_init__(self) -> None:
        self.host_name = self.host.name

    def note_end(self, code: int | None = None) -> None:
        """Record that the rank has ended with an exit code; None if the host is lost, so that the code is unknown."""
        if not self.has_ended():
            self._code = code
            os.eventfd_write(self.pidfd, 1)

    def kill(self) -> None:
        """Kill this rank, and all other ranks on its host."""
        self.host.say("kill")

    def reap(self) -> int | None:
        self.has_ended(REAP_SECONDS)
        return self._code

    def close(self) -> None:
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
