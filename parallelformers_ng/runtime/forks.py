"""Starts ranks by forking: requests them from a fork server, which this process starts and keeps.

Each calling process has one fork server, started with the first group or earlier. The server runs `fork_server.py`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
import weakref

from parallelformers_ng.collectives.control_groups import kernel_text
from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.runtime import fork_server, spawn
from parallelformers_ng.runtime.spawn import ChildLink, Spawned, is_readable
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

log = logging.getLogger("parallelformers_ng")

SWITCH = "PARALLELFORMERS_NG_FORK_SERVER"  # environment variable; 0 starts every rank as a fresh process

# Prefixes of environment variables that Python or a library reads at its start. A fork keeps their old values.
_READ_AT_START = (
    "ATEN_", "BLIS_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_",
    "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SSL_", "TORCH", "TRANSFORMERS_", "TZ",
)  # fmt: skip
_INHERITED = ("Uid", "Gid", "Groups", "Umask", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")


class Fork:
    """A rank that was requested from a fork server; `pid` is 0 until `await_start` returns True."""

    def __init__(self, server: ForkServer, link: ChildLink) -> None:
        self.pid, self.pidfd = 0, -1
        self._code: int | None = None
        self._server: ForkServer | None = server  # this reference keeps the server running
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self._report, their_report = socket.socketpair()
            ours.enter_context(self._report)
            theirs.enter_context(their_report)
            folder = os.open(spawn.current_folder(), os.O_PATH | os.O_DIRECTORY)
            theirs.callback(os.close, folder)
            nowhere = theirs.enter_context(open(os.devnull, "w"))
            output = 1 if os.path.exists("/proc/self/fd/1") else nowhere.fileno()
            descriptors = [*link.theirs, link.log, output, folder, their_report.fileno()]
            with contextlib.suppress(BrokenPipeError):  # the server has ended, which `await_start` will report
                socket.send_fds(server.link.connection, [b"f"], descriptors, socket.MSG_NOSIGNAL)
            ours.pop_all()
        server.forks.add(self)

    def await_start(self, deadline: float) -> bool:
        """Wait until the server has forked the rank, and return True; return False if the server has ended."""
        if self.pid or self._server is None:
            return bool(self.pid)
        if not is_readable(self._report.fileno(), deadline - time.monotonic()):
            raise RequestTimeoutError(f"the fork server (pid {self._server.pid}) has not forked the rank yet")
        message, descriptors, *_ = socket.recv_fds(self._report, fork_server.NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        number = fork_server.NUMBER.unpack(message)[0]
        if number > 0 and not descriptors:  # this process has no free descriptor, so the kernel dropped the pidfd
            number = -errno.EMFILE
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self.pid, self.pidfd = number, descriptors[0]
        return True

    def exit_code(self, seconds: float) -> int | None:
        """Wait up to `seconds` for the end of the rank; return its exit code, or minus the signal that killed it.

        Return None if the rank does not end in time, or if the server, which knows the code, has ended.
        """
        if self._code is None and is_readable(self._report.fileno(), seconds):
            message = self._report.recv(fork_server.NUMBER.size)
            self._code = fork_server.NUMBER.unpack(message)[0] if message else None
        return self._code

    def close(self) -> None:
        """Close the descriptors that refer to the rank. A rank that is not forked yet ends when its lifeline closes."""
        self._report.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._server is not None:
            self._server.forks.discard(self)
            self._server = None


class ForkServer:
    """The caller's side of a fork server, which ends when neither a rank nor code of this process refers to it."""

    def __init__(self, inheritance: object, imports: str) -> None:
        self.inheritance = inheritance
        self.imports = imports
        self.link = ChildLink("fork-server")
        try:
            # An import may count devices. With this setting torch counts them by NVML; CUDA, once initialized, does not
            # survive a fork.
            environment = spawn.environment_of_worker(threads=1) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            self._process = Spawned(fork_server.__name__, self.link, environment, imports)
        except BaseException:
            self.link.close()
            raise
        self.link.hand_over()
        self.pid = self._process.pid
        self._shown = 0
        self.forks: weakref.WeakSet[Fork] = weakref.WeakSet()
        self._end = weakref.finalize(self, _end, self._process, self.link, self.forks)
        _all.add(self)

    def exit_code(self) -> int | None:
        """Return the server's exit code, or None while it runs. A negative code is minus the signal that killed the
        server; with a positive code, the server found that it must not fork."""
        return self._process.exit_code(0.0)

    def request_traceback(self) -> None:
        spawn.send_signal(self._process.pidfd, signal.SIGUSR1)

    def new_log(self) -> str:
        """Return the text that the server has written to its log since the last call, at most the last 8 KiB."""
        start, self._shown = self._shown, self.link.log_size()
        return self.link.log_tail(start)

    def forget(self) -> None:
        """Close this process's descriptors without ending the server. Called in a forked child of the caller."""
        self._end.detach()
        self.link.close()
        self._process.close()


_all: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_lock = threading.Lock()
_newest: ForkServer | None = None


def running(imports: str | None = None) -> ForkServer | None:
    """Return a running fork server, or start one; return None if ranks have to be started as fresh processes.

    A running server is used only if its forks would inherit the same state as a fresh process of this thread. The
    result is None if the environment variable `PARALLELFORMERS_NG_FORK_SERVER` is 0, or if a server cannot start or
    must not fork.
    """
    global _newest
    if os.environ.get(SWITCH) == "0":
        return None
    with _lock:
        inheritance = _inheritance()
        if _newest is not None and _newest.inheritance == inheritance:
            code = _newest.exit_code()
            if code is None and imports in (None, _newest.imports):
                return _newest
            if code is not None and code > 0:  # the server must not fork, and a new server would find the same
                return None
        try:
            _newest = ForkServer(inheritance, imports or "torch")
        except Exception as error:
            raise_if_of_handler(error)
            log.debug("the fork server could not be started: %s", error)
            return None
        return _newest


def _end(process: Spawned, link: ChildLink, forks: weakref.WeakSet[Fork]) -> None:
    """End a fork server that has no ranks: close its lifeline, and the kernel kills the server.

    At interpreter exit a daemon thread may still wait for a request to ranks, and must not see an error. A server with
    ranks is therefore not ended here; the server and its ranks end with this process.
    """
    if forks:
        return
    link.close()
    process.exit_code(spawn.REAP_SECONDS)
    process.close()


def _forget_in_forked_child() -> None:
    global _newest, _lock
    _newest, _lock = None, threading.Lock()
    # With an open copy of its lifeline, a server would not notice the end of its parent.
    for server in list(_all):
        server.forget()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _inheritance() -> tuple[object, ...]:
    """Return the state that a child of this thread inherits: user, limits, priority, CPUs and environment variables.

    A fork server that started with other state must not fork ranks for this thread.
    """
    status = kernel_text("/proc/thread-self/status").splitlines()
    return (
        [line for line in status if line.startswith(_INHERITED)],
        kernel_text("/proc/thread-self/cgroup"),
        [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        os.getpriority(os.PRIO_PROCESS, 0),
        {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)},
        sys.executable,
        spawn.module_path(),
    )
