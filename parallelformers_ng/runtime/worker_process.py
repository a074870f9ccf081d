"""Starts, watches and ends one worker process, from the parent's side."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator

from parallelformers_ng.errors import GroupError, RequestTimeoutError, StartupError, WorkerDiedError
from parallelformers_ng.runtime.forks import Fork, ForkServer
from parallelformers_ng.runtime.spawn import REAP_SECONDS, ChildLink, Spawned, is_readable, send_signal
from parallelformers_ng.wire.transport import Channel

log = logging.getLogger("parallelformers_ng")

EXIT_SECONDS = 1.0  # maximum time between the end of a worker's socket and the end of its process


class WorkerGoneError(GroupError):
    """A worker has ended, or has closed its socket. Callers get a WorkerDiedError instead."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the worker of rank {rank} is gone")
        self.rank = rank


class WorkerProcess:
    """One worker, from the parent's side. The worker has a process after `await_start`.

    Args:
        rank: rank of the worker.
        environment: environment variables of a fresh process.
        server: fork server that forks the worker. If `server` is None
            or has ended, the worker is a fresh process.

    Attributes:
        rank: argument `rank`.
        link: link between this process and the worker.
        channel: channel for messages, over the socket of the link.

    Raises:
        StartupError: the interpreter could not be started, or this process cannot open more files.
    """

    def __init__(self, rank: int, environment: dict[str, str], server: ForkServer | None) -> None:
        self.rank = rank
        self._environment = environment
        self._server = server
        with self._start_errors():
            self.link = ChildLink(f"rank-{rank}")
            try:
                self._process: Fork | Spawned = Fork(server, self.link) if server else self._spawn()
            except BaseException:
                self.link.close()
                raise
        self.channel = Channel(self.link.connection)

    def _spawn(self) -> Spawned:
        return Spawned("parallelformers_ng.runtime.worker", self.link, self._environment)

    @contextlib.contextmanager
    def _start_errors(self) -> Iterator[None]:
        try:
            yield
        except RequestTimeoutError:  # RequestTimeoutError is also an OSError
            raise
        except OSError as error:
            raise StartupError(f"rank {self.rank}: {sys.executable} could not be started: {error}") from error

    def await_start(self, deadline: float) -> None:
        """Wait until the worker has a process; return at once if the process exists already.

        Args:
            deadline: latest time to return, in seconds of `time.monotonic`.

        Raises:
            StartupError: the system cannot start more processes, or this process cannot open more files.
            RequestTimeoutError: the fork server, which may still be importing, has not answered before the deadline.
        """
        with self._start_errors():
            if not self._process.await_start(deadline):
                assert self._server is not None, "a spawned process exists at once"
                why = self._server.link.log_tail().strip()
                log.debug("rank %d is started as a fresh process; the fork server has ended: %s", self.rank, why)
                self._process.close()
                self._process, self._server = self._spawn(), None
        self.link.hand_over()

    @property
    def pid(self) -> int:
        """Process id of the worker.

        Raises:
            StartupError: `await_start` has not returned yet.
        """
        if self._process.pid is None:
            raise StartupError(f"rank {self.rank} has no process yet")
        return self._process.pid

    @property
    def _has_process(self) -> bool:
        return self._process.pid is not None

    @property
    def pidfd(self) -> int:
        """Descriptor that is readable after the process has ended; -1 before `await_start`."""
        return self._process.pidfd

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds for the end of the process; return whether it has ended or never existed."""
        pidfd = self.pidfd  # read once: another thread may be closing it
        return pidfd < 0 or is_readable(pidfd, timeout)

    def kill(self) -> None:
        """Kill the process at once, even if it is stopped."""
        if not self.has_ended():
            send_signal(self.pidfd, signal.SIGKILL)

    def request_traceback(self) -> None:
        """Make a starting worker, or its fork server if the worker is not forked yet, write a traceback to its log."""
        if not self.has_ended():
            send_signal(self.pidfd, signal.SIGUSR1)
        elif self._server is not None and not self._has_process:
            self._server.request_traceback()

    def exit_status(self) -> tuple[int | None, int | None]:
        """Return (signal, exit code) of a worker: either the signal or the exit code is None; both are None if the
        exit code is unknown. A worker that does not end within 1 s is killed."""
        if not self.has_ended(EXIT_SECONDS):
            self.kill()
        code = self.reap()
        return (-code, None) if code is not None and code < 0 else (None, code)

    def reap(self) -> int | None:
        """Wait up to 5 s for a killed process and return its exit code, or minus its signal.

        None if the process does not end in that time, if the exit code is unknown, or if there is no process.
        """
        return self._process.exit_code(REAP_SECONDS) if self._has_process else None

    def death(self, device_name: str) -> Callable[[], WorkerDiedError]:
        """Return a function that makes the error about the end of this worker. Kill a worker that does not end in 1 s.

        Args:
            device_name: name of the worker's device, such as "cuda:0", for the message.

        Returns:
            Function without arguments. Each call makes a new error, so that several threads can raise the error.

        Raises:
            StartupError: the worker has no process yet.
        """
        number, code = self.exit_status()
        manner = manner_of_end(number, code)
        hint = "; the kernel's out-of-memory killer sends signal 9, see dmesg" if number == 9 else ""
        text = (
            f"the worker of rank {self.rank} (pid {self.pid}, {device_name}) died: {manner}{hint}; "
            "a group needs all its ranks, so the group has ended"
        )
        return functools.partial(WorkerDiedError, text, self.rank, number, code)

    def startup_log(self) -> str:
        """Return the end of the start log of the worker, or of its fork server if the worker is not forked yet."""
        return self.link.log_tail() if self._server is None or self._has_process else self._server.link.log_tail()

    def close(self) -> None:
        """Close all descriptors that this process has for the worker."""
        self.channel.close()
        self._process.close()
        self.link.close()
        self._server = None


def manner_of_end(number: int | None, code: int | None) -> str:
    """Return how a process ended, as text.

    Args:
        number: signal that killed the process, or None.
        code: exit code of the process, or None.
    """
    if number:
        return f"signal {number}"
    return "with its fork server" if code is None else f"exit code {code}"
