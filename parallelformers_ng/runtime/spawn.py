"""Starts Python interpreters for workers: the link to the parent process, and the environment."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable

from parallelformers_ng.errors import StartupError

REAP_SECONDS = 5.0  # maximum wait for the end of a killed process; only a driver can delay it
_TAIL_BYTES = 8192


class ChildLink:
    """The link between a child process and its parent: a socket, a lifeline and a log.

    Attributes:
        lifeline: write end of a pipe, which the parent keeps open; the child ends when it closes (see `worker.py`).
        log: descriptor of a file in memory, to which the child's standard error goes until the child is ready.
        theirs: descriptors of the child's ends of socket and lifeline, open in this process until `hand_over`.
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
        """Close this process's copies of the child's ends, after the child has received its own copies."""
        for fd in self.theirs:
            os.close(fd)
        self.theirs = ()

    def log_size(self) -> int:
        return os.fstat(self.log).st_size

    def log_tail(self, start: int = 0) -> str:
        """Return the last part of the child's log after byte `start`, at most 8 KiB."""
        return self.log_since(max(start, self.log_size() - _TAIL_BYTES))

    def log_since(self, start: int) -> str:
        return os.pread(self.log, self.log_size() - start, start).decode(errors="replace")

    def close(self) -> None:
        self.hand_over()
        self.connection.close()
        if self.log >= 0:
            os.close(self.log)
            os.close(self.lifeline)
            self.log = self.lifeline = -1


class Spawned:
    """A fresh Python interpreter, with the same interface as `forks.Fork`; its process exists at once.

    The command is `python -m module SOCKET LIFELINE PARENT ARGUMENTS`: SOCKET and LIFELINE are descriptors of the link,
    and PARENT is the id of this process.
    """

    def __init__(self, module: str, link: ChildLink, environment: dict[str, str], *arguments: str) -> None:
        if not sys.executable:
            raise StartupError("sys.executable is empty, so there is no interpreter to start the workers with")
        self._popen = subprocess.Popen(
            # -P: a torch.py or random.py in the current folder must not shadow the real module. -u: output of a worker
            # appears even if the worker is killed right afterwards.
            [sys.executable, "-P", "-u", "-m", module, *map(str, link.theirs), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=link.log,
            pass_fds=link.theirs,
            # PYTHONPATH suffices to find this package and torch; the first message has the exact `sys.path`.
            env=environment | {"PYTHONPATH": os.pathsep.join(module_path())},
            # A process group of its own, so that Ctrl-C reaches only the parent. A new session would do the same, but
            # the kernel may schedule each session as a group (autogroup). sched_yield does not yield to other groups,
            # so a process that polls actively would keep the core.
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
    """Return the environment of a worker: this process's variables, and settings that libraries read at import."""
    defaults = {
        # With an equal hash seed, a set of strings has the same order on every rank.
        "PYTHONHASHSEED": "0",
        # By default, threads of libgomp spin 300,000 times before they sleep, on cores that other threads need.
        "GOMP_SPINCOUNT": "10000",
        # A pass over a long prompt allocates and frees the same few megabytes again and again. If malloc returned them
        # to the system each time, the kernel would clear and map every page again. 32 MiB is glibc's largest value.
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
        # cuDNN's attention, torch's first choice on Hopper, makes a plan for each new length of a prompt: that takes
        # 40 ms, longer than a prompt of 512 tokens, and the plans are never freed. Flash attention makes no plans.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        # After the death of a rank, torch's watchdog for NCCL writes lines for each other rank with LOG(ERROR)
        # (ProcessGroupNCCL.cpp), and the caller gets a WorkerDiedError, which says more. torch reads the level once, at
        # its import (c10/util/Logging.cpp, setLogLevelFlagFromEnv). Python's warnings and exceptions do not use it.
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(threads))
    return defaults | os.environ | counts


def module_path() -> list[str]:
    """Return `sys.path` with absolute paths; if the current folder was deleted, without relative entries."""
    if current_folder() != ".":
        return [entry for entry in sys.path if os.path.isabs(entry)]
    return [os.path.abspath(entry) for entry in sys.path]


def current_folder() -> str:
    """Return the working folder for child processes: ".", or "/" if this process's folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return "."


def is_readable(fd: int, seconds: float) -> bool:
    """Wait up to `seconds` until a descriptor is readable, and return whether it is. A pidfd is readable after its
    process has ended."""
    return bool(poll_of([fd]).poll(max(seconds, 0.0) * 1000))


def poll_of(fds: Iterable[int]) -> select.poll:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return poll


def send_signal(pidfd: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
