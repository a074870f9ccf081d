"""Python interpreters of our own, started beside the caller's: what joins one to its parent, and its environment."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Protocol

from parallelformers_ng.errors import StartupError

REAP_SECONDS = 5.0  # a killed process is gone in milliseconds unless a driver blocks it
_TAIL_BYTES = 8192


class ChildLink:
    """The link between a child and its parent: a socket, a lifeline and a log.

    Attributes:
        connection: the parent's end of the socket.
        lifeline: the parent's end of a pipe. Nothing is ever written; that it closes is the message (see `worker.py`).
        log: a file in memory, the child's standard error until it is ready.
        theirs: the child's ends of socket and lifeline, open until `hand_over`.

    Raises:
        OSError: this process may open no more files.
    """

    def __init__(self, name: str) -> None:
        with contextlib.ExitStack() as opened:
            self.log = os.memfd_create(f"parallelformers_ng-{name}", os.MFD_CLOEXEC)
            opened.callback(os.close, self.log)
            self.connection, their_connection = socket.socketpair()
            opened.callback(self.connection.close)
            opened.callback(their_connection.close)
            their_lifeline, self.lifeline = os.pipe()
            self.theirs: tuple[int, ...] = (their_connection.detach(), their_lifeline)
            opened.pop_all()

    def hand_over(self) -> None:
        """Close the child's ends, once it has them."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs = ()

    def log_size(self) -> int:
        """Return how many bytes the child has written to its log."""
        return os.fstat(self.log).st_size

    def log_tail(self, start: int = 0) -> str:
        """Return the end of what the child has written to its log from byte `start` on."""
        size = self.log_size()
        start = max(start, size - _TAIL_BYTES)
        return os.pread(self.log, size - start, start).decode(errors="replace")

    def close(self) -> None:
        """Close all ends that this process has. Does nothing the second time."""
        self.hand_over()
        self.connection.close()
        if self.log >= 0:
            os.close(self.log)
            os.close(self.lifeline)
            self.log = self.lifeline = -1


class Process(Protocol):
    """A process that was started, or asked for."""

    @property
    def pid(self) -> int | None:
        """None until `await_start`."""

    @property
    def pidfd(self) -> int:
        """-1 until `await_start`."""

    def await_start(self, deadline: float) -> bool:
        """Return whether there is a process, waiting for that until the deadline, on the clock of `time.monotonic`.

        Raises:
            RequestTimeoutError: it is not known yet.
            OSError: the system starts no more processes, or this one may open no more files.
        """

    def exit_code(self, seconds: float) -> int | None:
        """Return its code as subprocess counts them; None if it does not end within `seconds`, or nobody knows
        the code."""

    def close(self) -> None:
        """Close what this process has open for it. Does nothing the second time."""


class Spawned:
    """A fresh interpreter, a `Process` that is there at once.

    It runs a module as `python -m module SOCKET LIFELINE PARENT ARGUMENTS`, the first two are descriptors of the link.

    Args:
        module: its full name.
        link: joins it to this process.
        environment: its environment.
        arguments: more of what the module takes.

    Raises:
        OSError: the system starts no more processes, or this one may open no more files.
        StartupError: it is not known which interpreter to start.
    """

    def __init__(self, module: str, link: ChildLink, environment: dict[str, str], *arguments: str) -> None:
        if not sys.executable:
            raise StartupError("sys.executable is empty, so there is no interpreter to start the workers with")
        self._popen = subprocess.Popen(
            # -P: a torch.py or random.py in the current folder must not be found before the real one. -u: what a worker
            # prints is seen even if it is killed right after.
            [sys.executable, "-P", "-u", "-m", module, *map(str, link.theirs), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=link.log,
            pass_fds=link.theirs,
            # Enough to find this package and torch; the exact list follows in the first message.
            env=environment | {"PYTHONPATH": os.pathsep.join(module_path())},
            # Ctrl-C is for the parent alone. A session of its own would see to that, too; but the kernel may schedule
            # sessions as groups (autogroup), between which sched_yield does not give way: a process that spins would
            # keep the core.
            process_group=0,
            cwd=current_folder(),
        )
        self.pid = self._popen.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:
            self._popen.kill()
            self._popen.wait()
            raise

    def await_start(self, deadline: float) -> bool:
        return True

    def exit_code(self, seconds: float) -> int | None:
        return self._popen.wait() if self.pidfd >= 0 and is_readable(self.pidfd, seconds) else None

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def environment_of_worker(threads: int) -> dict[str, str]:
    """Return the environment of a worker: a copy of this process's, with variables that libraries read when they load.

    Args:
        threads: for its OpenMP and BLAS libraries.
    """
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # A set of strings that a caller's processor goes through has the same order on every rank.
    environment.setdefault("PYTHONHASHSEED", "0")
    # The threads of libgomp spin 300,000 times before they sleep, on cores that the threads of the kernels need.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    # A pass over a long prompt asks for the same few megabytes again and again; given back to the system in between,
    # every page would be cleared and mapped anew. 32 MiB is the most that glibc takes.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(256 << 20))
    return environment


def module_path() -> list[str]:
    """`sys.path`, with the current folder under its full name; without it if it was deleted."""
    if current_folder() != ".":
        return [entry for entry in sys.path if os.path.isabs(entry)]
    return [os.path.abspath(entry) for entry in sys.path]


def current_folder() -> str:
    """Return the working folder for children of this process: its current folder, or "/" if that was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return "."


def is_readable(fd: int, seconds: float) -> bool:
    """Return whether something can be read, waiting for that up to `seconds`; of a pidfd: whether the process has
    ended."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(seconds, 0.0) * 1000))


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
