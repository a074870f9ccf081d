"""Starts and controls the hosts of a group, and releases the hosts at the end of the group."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from parallelformers_ng.errors import ChannelClosedError, GroupError, ParallelError, RequestTimeoutError, StartupError
from parallelformers_ng.hosts.agent import CHECK_SECONDS, accept_each, machine, purpose
from parallelformers_ng.hosts.launcher import Launcher
from parallelformers_ng.hosts.remote import STEER_SECONDS, Host, RemoteWorker
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.spawn import is_readable, poll_of
from parallelformers_ng.runtime.startup import StartSettings
from parallelformers_ng.wire.frame import FrameKind
from parallelformers_ng.wire.signed import SignedChannel


class Hosts:
    """The hosts of one group, with the methods of an `Arena`, which act on the arenas of all hosts."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._token = secrets.token_bytes(8)
        self._hosts: list[Host] = []
        self._workers: list[RemoteWorker] = []
        self._resets = threading.Semaphore(0)
        self._generation = 0  # number of resets so far, to recognize a late report of an abort before the last reset
        self._steering = threading.Lock()  # held while commands are sent, so that all hosts get them in the same order
        self._started: Future[None] = Future()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self._closed = False
        self.owner = os.getpid()

    @property
    def aborted(self) -> bool:
        """Whether to assume that a rank has aborted the collectives: always, because only the hosts know."""
        return True

    @property
    def names(self) -> list[str]:
        return [host.name for host in self._hosts]

    @property
    def counts(self) -> list[int]:
        return [len(host.pids) for host in self._hosts]

    @property
    def are_here(self) -> bool:
        return [host.machine for host in self._hosts] == [machine()]

    def launch(
        self, processes: Processes, settings: StartSettings, device_names: list[str], among: tuple[int, int]
    ) -> Callable[[], None]:
        """Start the ranks in a new thread, and return a function that waits until all ranks are ready.

        The thread then receives the agents' reports until `close`. The returned function raises StartupError if the
        ranks cannot be started in time.

        Args:
            device_names: device of each rank; on several hosts, the returned function adds the host to the names of
                CUDA devices, in place.
            among: ignored, because each host divides its own CPUs among its ranks.
        """
        settings = replace(settings, threads=settings.threads or self._launcher.threads)
        order = {"settings": settings, "device": device_names[0].partition(":")[0]}
        arguments = (len(device_names), order, time.monotonic() + settings.start_timeout)
        self._thread = threading.Thread(target=self._run, args=arguments, name="parallelformers_ng-hosts", daemon=True)
        self._thread.start()

        def wait() -> None:
            self._started.result()
            processes.workers = self._workers
            if order["device"] == "cuda":
                places = [(f"cuda:{index}", host.name) for host in self._hosts for index in range(len(host.pids))]
                device_names[:] = [f"{device} on {name}" if len(self._hosts) > 1 else device for device, name in places]

        return wait

    def abort(self, reason: str = "the group is ending") -> None:
        for host in self._hosts:
            host.say("abort", reason)

    def request_cancel(self, sequence: int) -> None:
        for host in self._hosts:
            host.say("cancel", sequence)

    def reset(self) -> None:
        """Reset the arenas of all hosts, as `Arena.reset` does. Return when all hosts have reported the reset, or after
        10 s."""
        with self._steering:
            self._generation += 1
            for host in self._hosts:
                host.say("reset")
        end = time.monotonic() + STEER_SECONDS
        for _ in self._hosts:
            self._resets.acquire(timeout=max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """End the ranks: agents end them when their connection closes. In a forked child, only close descriptors."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self.owner:
            os.eventfd_write(self._wakeup, 1)
            if self._thread is not None and threading.current_thread() is not self._thread:
                self._thread.join()
        for host in self._hosts:
            host.control.close()
        os.close(self._wakeup)
        if os.getpid() == self.owner:
            self._launcher.close(patient=not any(host.is_lost for host in self._hosts))

    def _run(self, world_size: int, order: dict[str, Any], deadline: float) -> None:
        try:
            self._start(world_size, order, deadline)
        except (ParallelError, OSError) as error:
            hint = f"; start_timeout is {order['settings'].start_timeout:g} s"
            text = f"{error}{hint if isinstance(error, RequestTimeoutError) else ''}"
            self._started.set_exception(error if isinstance(error, StartupError) else StartupError(text))
        except BaseException as error:
            self._started.set_exception(StartupError(f"{type(error).__name__}: {error}"))
            raise
        else:
            self._started.set_result(None)
            self._watch()

    def _start(self, world_size: int, order: dict[str, Any], deadline: float) -> None:
        listener, counts = self._launcher.start(world_size, order["device"], deadline, self._check)
        connections = accept_each(listener, {b"host %d" % at: at for at in range(len(counts))}, deadline, self._check)
        with contextlib.ExitStack() as unmet:  # if an error occurs, it closes the connections, which ends the agents
            for connection, _ in connections.values():
                unmet.callback(connection.close)
            for number, count in enumerate(counts):
                devices = count if order["device"] == "cuda" else 0
                self._hosts.append(Host.of(*connections[number], devices, deadline))
            unmet.pop_all()
        order |= {"counts": counts, "token": self._token, "listeners": [host.listens for host in self._hosts]}
        for host in self._hosts:
            host.control.send(FrameKind.REQUEST, 0, order, deadline)
        due = {purpose("rank", rank, self._token): rank for rank in range(world_size)}
        ranks = accept_each(listener, due, deadline, self._check)
        for host in self._hosts:
            while not self._is_ready(host, deadline):
                self._check()
            for pid in host.pids:
                rank = len(self._workers)
                self._workers.append(RemoteWorker(rank, host, SignedChannel(*ranks[rank]), pid))

    def _check(self) -> None:
        if self._closed:
            raise StartupError("the group was closed while it started")
        self._launcher.check()
        for host in self._hosts:
            if is_readable(host.control.fileno(), 0.0) or host.control.has_more:
                self._is_ready(host, time.monotonic() + STEER_SECONDS)

    def _is_ready(self, host: Host, deadline: float) -> bool:
        if host.pids or not (host.control.has_more or is_readable(host.control.fileno(), CHECK_SECONDS)):
            if time.monotonic() >= deadline:
                raise RequestTimeoutError(f"the ranks of host {host.name} were not ready in time")
            return bool(host.pids)
        try:
            kind, _, value = host.control.recv(deadline)
        except ChannelClosedError:
            raise StartupError(f"host {host.name} was lost while its ranks started") from None
        if kind is not FrameKind.READY:
            raise StartupError(f"host {host.name}: {value}")
        host.pids = value
        return True

    def _watch(self) -> None:
        hosts = {host.control.fileno(): host for host in self._hosts}
        poll = poll_of([self._wakeup, *hosts])
        ready: list[int] = []
        while self._wakeup not in ready:
            ready = [fd for fd, _ in poll.poll()]
            for fd in set(ready) & hosts.keys():
                try:
                    self._hear(hosts[fd])
                except GroupError as error:
                    poll.unregister(fd)
                    self._lose(hosts[fd], error)

    def _hear(self, host: Host) -> None:
        while True:
            _, _, (word, *values) = host.control.recv(time.monotonic() + STEER_SECONDS)
            if word == "ended":
                rank, code = values
                self._workers[rank].note_end(code)
            elif word == "aborted":
                self._abort_others(host, *values)
            elif word == "reset":
                self._resets.release()
            if not host.control.has_more:
                return

    def _lose(self, host: Host, error: GroupError) -> None:
        host.is_lost = True
        for worker in self._workers:
            if worker.host is host:
                worker.note_end()
        self._abort_others(host, self._generation, f"host {host.name} is lost: {error}")
        self._resets.release()

    def _abort_others(self, host: Host, generation: int, reason: str) -> None:
        """Abort the collectives on all hosts except `host`. A report from before the last reset has no effect."""
        with self._steering:
            for other in self._hosts if generation == self._generation else ():
                if other is not host:
                    other.say("abort", reason)
