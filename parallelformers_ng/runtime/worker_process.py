"""One worker process as the parent sees it: forked or spawned, watched, ended."""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator

from parallelformers_ng.errors import GroupError, RequestTimeoutError, StartupError, WorkerDiedError
from parallelformers_ng.runtime.forks import Fork, ForkServer
from parallelformers_ng.runtime.spawn import REAP_SECONDS, ChildLink, Process, Spawned, is_readable, send_signal
from parallelformers_ng.wire.transport import Channel

log = logging.getLogger("parallelformers_ng")

EXIT_SECONDS = 1.0  # between the end of a worker's socket, or its farewell, and the end of the worker


class WorkerGoneError(GroupError):
    """A worker ended, or hung up, in the middle of a request. Callers get a WorkerDiedError in its place."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the worker of rank {rank} is gone")
        self.rank = rank


class WorkerProcess:
    """One worker, from the parent's side. It has a process after `await_start`.

    Args:
        rank: its rank.
        environment: environment of a fresh process.
        server: server that forks it. Without one, or if it cannot, the worker is a fresh process.

    Raises:
        StartupError: the interpreter could not be started, or this process may open no more files.
    """

    def __init__(self, rank: int, environment: dict[str, str], server: ForkServer | None) -> None:
        self.rank = rank
        self._environment = environment
        self._server = server
        with self._start_errors():
            self.link = ChildLink(f"rank-{rank}")
            try:
                self._process: Process = Fork(server, self.link) if server else self._spawn()
            except BaseException:
                self.link.close()
                raise
        self.channel = Channel(self.link.connection)

    def _spawn(self) -> Process:
        return Spawned("parallelformers_ng.runtime.worker", self.link, self._environment)

    @contextlib.contextmanager
    def _start_errors(self) -> Iterator[None]:
        try:
            yield
        except RequestTimeoutError:  # an OSError, too
            raise
        except OSError as error:
            raise StartupError(f"rank {self.rank}: {sys.executable} could not be started: {error}") from error

    def await_start(self, deadline: float) -> None:
        """Wait until the worker has a process. Does nothing if it has.

        Args:
            deadline: on the clock of `time.monotonic`, in seconds.

        Raises:
            StartupError: the system starts no more processes, or this one may open no more files.
            RequestTimeoutError: the fork server, which may be importing, has not answered.
        """
        with self._start_errors():
            if not self._process.await_start(deadline):
                assert self._server is not None, "a spawned process is there"
                why = self._server.link.log_tail().strip()
                log.debug("rank %d is started as a fresh process; the fork server has ended: %s", self.rank, why)
                self._process.close()
                self._process, self._server = self._spawn(), None
        self.link.hand_over()

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            StartupError: there is none before `await_start`.
        """
        if self._process.pid is None:
            raise StartupError(f"rank {self.rank} has no process yet")
        return self._process.pid

    @property
    def _has_process(self) -> bool:
        return self._process.pid is not None

    @property
    def pidfd(self) -> int:
        """Readable once the process has ended; -1 before `await_start`."""
        return self._process.pidfd

    def has_ended(self, timeout: float = 0.0) -> bool:
        """True once the process is gone, or if there is none, waiting for that up to `timeout` seconds."""
        pidfd = self.pidfd  # read once: another thread may be closing it
        return pidfd < 0 or is_readable(pidfd, timeout)

    def kill(self) -> None:
        """End the process at once; one that is stopped, too."""
        if not self.has_ended():
            send_signal(self.pidfd, signal.SIGKILL)

    def request_traceback(self) -> None:
        """Have a worker that is starting, or the server that is to fork it, say in its log where in the code it is."""
        if not self.has_ended():
            send_signal(self.pidfd, signal.SIGUSR1)
        elif self._server is not None and not self._has_process:
            self._server.request_traceback()

    def exit_status(self) -> tuple[int | None, int | None]:
        """(signal, exit code) of a worker that ended: one of them None, or both if nobody can tell. One that lingers
        is killed."""
        if not self.has_ended(EXIT_SECONDS):
            self.kill()
        code = self.reap()
        return (-code, None) if code is not None and code < 0 else (None, code)

    def reap(self) -> int | None:
        """Collect a killed process. Returns its code as subprocess counts them, or None if it still hangs."""
        return self._process.exit_code(REAP_SECONDS) if self._has_process else None

    def death(self, device_name: str) -> Callable[[], WorkerDiedError]:
        """Return the error, raised once or often, about a worker that ended."""
        number, code = self.exit_status()
        manner = manner_of_end(number, code)
        hint = "; the kernel's memory killer sends signal 9, see dmesg" if number == 9 else ""
        text = (
            f"the worker of rank {self.rank} (pid {self.pid}, {device_name}) died: {manner}{hint}; "
            "tensor-parallel ranks live and die together, so its group has ended"
        )
        return functools.partial(WorkerDiedError, text, self.rank, number, code)

    def startup_log(self) -> str:
        """Return the end of the standard error of the worker, or of the server that forks it, before it was ready."""
        return self.link.log_tail() if self._server is None or self._has_process else self._server.link.log_tail()

    def close(self) -> None:
        """Close this process's descriptors of the worker."""
        self.channel.close()
        self._process.close()
        self.link.close()
        self._server = None


def manner_of_end(number: int | None, code: int | None) -> str:
    """Return how a process ended, in words, given its signal or its exit code."""
    if number:
        return f"signal {number}"
    return "with its fork server" if code is None else f"exit code {code}"
