"""Starts, watches and ends one worker process, from the parent's side."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator

from parallelformers_ng.errors import RequestTimeoutError, StartupError, WorkerDiedError
from parallelformers_ng.runtime.forks import Fork, ForkServer
from parallelformers_ng.runtime.spawn import REAP_SECONDS, ChildLink, Spawned, is_readable, send_signal
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler
from parallelformers_ng.wire.transport import Channel

log = logging.getLogger("parallelformers_ng")

EXIT_SECONDS = 1.0  # seconds between a worker's socket closing and the end of its process, at most


class Worker:
    """The process of one rank, as seen from a running group.

    Attributes:
        pid: process id, on the host of the rank; 0 before the rank has a process.
        pidfd: descriptor that is readable after the process has ended; -1 before the rank has a process.
        unknown_end: text for error messages if neither a signal nor an exit code of the ended process is known.
    """

    rank: int
    channel: Channel
    pid: int
    pidfd: int
    host_name: str | None = None
    unknown_end = "with its fork server"

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds for the end of the process; return whether it has ended or never existed."""
        pidfd = self.pidfd  # read once, because another thread may set it to -1
        return pidfd < 0 or is_readable(pidfd, timeout)

    def kill(self) -> None:
        raise NotImplementedError

    def reap(self) -> int | None:
        """Wait up to 5 s for the end of the process. Return its exit code, or minus the signal that killed it; None if
        the process does not end in that time, if the exit code is unknown, or if there is no process."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def request_traceback(self) -> Callable[[], str] | None:
        """Make the worker write a traceback. Return a function that reads what the worker has written since; None for a
        worker on another host."""
        return None

    def exit_status(self) -> int | None:
        """Return the worker's exit code as `reap` does, but kill a worker that does not end within 1 s."""
        if not self.has_ended(EXIT_SECONDS):
            self.kill()
        return self.reap()

    def manner_of_end(self, code: int | None) -> str:
        if code is None:
            return self.unknown_end
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def death(self, device_name: str) -> Callable[[], WorkerDiedError]:
        """Return a function that makes the error about this worker's end. Kill a worker that runs longer than 1 s."""
        code = self.exit_status()
        number = -code if code is not None and code < 0 else None
        where, device = "", device_name
        if self.host_name is not None:
            where, device = f" on host {self.host_name}", device_name.removesuffix(f" on {self.host_name}")
        hint = (
            " (SIGKILL), sent by a program or, if dmesg says so, by the kernel's out-of-memory killer"
            if number == 9
            else ""
        )
        text = (
            f"the worker of rank {self.rank} (pid {self.pid}, {device}){where} died:"
            f" {self.manner_of_end(code)}{hint}; a group needs all its ranks, so the group has ended"
        )
        return functools.partial(WorkerDiedError, text, self.rank, number, None if number else code, self.host_name)


class WorkerProcess(Worker):
    """A worker that this process has started, as a fork or as a fresh process. It has a process after `await_start`."""

    phase = "importing torch"  # latest step of its start, for error messages

    def __init__(self, rank: int, environment: dict[str, str], server: ForkServer | None) -> None:
        self.rank = rank
        self._environment = environment
        self._server = server
        with self._start_errors():
            self.link = ChildLink(f"rank-{rank}")
            try:
                self._use(Fork(server, self.link) if server else self._spawn())
            except BaseException:
                self.link.close()
                raise
        self.channel = Channel(self.link.connection)

    def _spawn(self) -> Spawned:
        return Spawned("parallelformers_ng.runtime.worker", self.link, self._environment)

    def _use(self, process: Fork | Spawned) -> None:
        self._process, self.pid, self.pidfd = process, process.pid, process.pidfd

    @contextlib.contextmanager
    def _start_errors(self) -> Iterator[None]:
        try:
            yield
        except RequestTimeoutError:  # a subclass of OSError, but a timeout is not a failed start
            raise
        except OSError as error:
            raise_if_of_handler(error)
            raise StartupError(f"rank {self.rank}: {sys.executable} could not be started: {error}") from error

    def await_start(self, deadline: float) -> None:
        """Wait until the worker has a process; return at once if the process exists already."""
        with self._start_errors():
            if not self._process.await_start(deadline):
                assert self._server is not None, "a spawned process exists at once"
                why = self._server.link.log_tail().strip()
                log.debug("rank %d is started as a fresh process; the fork server has ended: %s", self.rank, why)
                self._process.close()
                self._process, self._server = self._spawn(), None
        self._use(self._process)
        self.link.hand_over()

    def kill(self) -> None:
        if not self.has_ended():
            send_signal(self.pidfd, signal.SIGKILL)

    def request_traceback(self) -> Callable[[], str]:
        """Make the worker (before the fork, its server) append a traceback to its log, also if it is stopped. Return a
        function that reads what was appended."""
        log = self._log_link
        written = functools.partial(log.log_since, log.log_size())
        if not self.has_ended():
            send_signal(self.pidfd, signal.SIGCONT)  # continue a stopped process, which could not write
            send_signal(self.pidfd, signal.SIGUSR1)
        elif self._server is not None and not self.pid:
            self._server.request_traceback()
        return written

    def reap(self) -> int | None:
        return self._process.exit_code(REAP_SECONDS) if self.pid else None

    @property
    def _log_link(self) -> ChildLink:
        return self.link if self._server is None or self.pid else self._server.link

    def startup_log(self) -> str:
        return self._log_link.log_tail()

    def close(self) -> None:
        self.pidfd = -1
        self.channel.close()
        self._process.close()
        self.link.close()
        self._server = None
