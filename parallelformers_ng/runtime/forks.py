"""Ranks that are forked: asked of a process that has imported all they need, which this one starts and keeps.

There is one for each caller's process, started with its first group or ahead of need. `fork_server.py` is what it runs.
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

from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.runtime import fork_server
from parallelformers_ng.runtime.spawn import (
    REAP_SECONDS,
    ChildLink,
    Spawned,
    current_folder,
    environment_of_worker,
    is_readable,
    module_path,
    send_signal,
)

log = logging.getLogger("parallelformers_ng")

SWITCH = "PARALLELFORMERS_NG_FORK_SERVER"
"""The environment variable that, set to 0, has every rank started as a fresh process."""

_LEAST = "torch"
"""The module that a server imports if nobody asks for more."""

# Read when Python starts or a library is imported, so that a fork has what they were then.
_READ_AT_START = (
    "ATEN_", "BLIS_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_",
    "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SSL_", "TORCH", "TRANSFORMERS_", "TZ",
)  # fmt: skip
_INHERITED = ("Uid", "Gid", "Groups", "Umask", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")


class Fork:
    """A rank that a server was asked for, a `Process`.

    Raises:
        OSError: this process may open no more files.
    """

    def __init__(self, server: ForkServer, link: ChildLink) -> None:
        self.pid: int | None = None
        self.pidfd = -1
        self._code: int | None = None
        self._server: ForkServer | None = server  # which lives as long as its ranks
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self._report, their_report = socket.socketpair()
            ours.enter_context(self._report)
            theirs.enter_context(their_report)
            folder = os.open(current_folder(), os.O_PATH | os.O_DIRECTORY)
            theirs.callback(os.close, folder)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            theirs.callback(os.close, nowhere)
            output = 1 if os.path.exists("/proc/self/fd/1") else nowhere
            descriptors = [*link.theirs, link.log, output, folder, their_report.fileno()]
            with contextlib.suppress(BrokenPipeError):  # the server has ended, which the wait for its answer will show
                socket.send_fds(server.link.connection, [b"f"], descriptors, socket.MSG_NOSIGNAL)
            ours.pop_all()
        server.forks.add(self)

    def await_start(self, deadline: float) -> bool:
        """Same as in `Process`; False if the server is gone."""
        if self.pid or self._server is None:
            return bool(self.pid)
        if not is_readable(self._report.fileno(), deadline - time.monotonic()):
            raise RequestTimeoutError(f"the fork server (pid {self._server.pid}) has not forked it yet")
        message, descriptors, *_ = socket.recv_fds(self._report, fork_server.NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        number = fork_server.NUMBER.unpack(message)[0]
        if number > 0 and not descriptors:  # dropped on the way, for want of a free number
            number = -errno.EMFILE
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self.pid, self.pidfd = number, descriptors[0]
        return True

    def exit_code(self, seconds: float) -> int | None:
        """Same as in `Process`; None also if the server is gone, as it alone could tell."""
        if self._code is None and is_readable(self._report.fileno(), seconds):
            message = self._report.recv(fork_server.NUMBER.size)
            self._code = fork_server.NUMBER.unpack(message)[0] if message else None
        return self._code

    def close(self) -> None:
        """Same as in `Process`. A requested rank that is not there yet ends with its lifeline."""
        self._report.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self._server is not None:
            self._server.forks.discard(self)
            self._server = None


class ForkServer:
    """A server, from the caller's side. It ends when neither this process nor a rank of it has any use for it.

    Args:
        inheritance: state of this process that its forks inherit.
        imports: name of the module that it imports before it forks.

    Attributes:
        link: joins it to this process; ranks are asked for over its socket.
        forks: the ranks that it was asked for and that are not closed.

    Raises:
        OSError, StartupError: it could not be started.
    """

    def __init__(self, inheritance: object, imports: str) -> None:
        self.inheritance = inheritance
        self.imports = imports
        self.link = ChildLink("fork-server")
        try:
            # Whether there are devices, an import may ask; it is then told by NVML, after which a fork may use them.
            environment = environment_of_worker(threads=1) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
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
        """Return its code as subprocess counts them, once it has ended: negative where it was killed, positive where
        it has found that it must not fork."""
        return self._process.exit_code(0.0)

    def request_traceback(self) -> None:
        """Have it write to its log where in the code it is."""
        send_signal(self._process.pidfd, signal.SIGUSR1)

    def new_log(self) -> str:
        """Return the text that it has written to its log since the last call."""
        start, self._shown = self._shown, self.link.log_size()
        return self.link.log_tail(start)

    def forget(self) -> None:
        """In a forked child of the caller: the server is the parent's."""
        self._end.detach()
        self.link.close()
        self._process.close()


_all: weakref.WeakSet[ForkServer] = weakref.WeakSet()
_lock = threading.Lock()
_newest: ForkServer | None = None


def running(imports: str | None = None) -> ForkServer | None:
    """Return the server to ask for ranks, started if there is none whose forks would be like fresh processes; None
    where ranks have to be started as fresh processes.

    Args:
        imports: name of the module that the server is to import; by default any server will do.
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
            if code is not None and code > 0:  # another would find the same
                return None
        try:
            _newest = ForkServer(inheritance, imports or _LEAST)
        except Exception as error:
            log.debug("the fork server could not be started: %s", error)
            return None
        return _newest


def _end(process: Spawned, link: ChildLink, forks: weakref.WeakSet[Fork]) -> None:
    """End a server that nobody needs: the kernel kills it when its lifeline closes. At interpreter exit a request
    may be in flight in a daemon thread, which must not see an error; the server then ends with this process, like
    the ranks."""
    if forks:
        return
    link.close()
    process.exit_code(REAP_SECONDS)
    process.close()


def _forget_in_forked_child() -> None:
    # As long as a copy of the lifeline is open somewhere, the server does not see that its parent is gone.
    global _newest, _lock
    _newest, _lock = None, threading.Lock()
    for server in list(_all):
        server.forget()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _inheritance() -> tuple[object, ...]:
    """Return the state that a process started by this thread inherits, apart from the values in every request."""
    status = _proc("status").splitlines()
    return (
        [line for line in status if line.startswith(_INHERITED)],
        _proc("cgroup"),
        [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        os.getpriority(os.PRIO_PROCESS, 0),
        {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_START)},
        sys.executable,
        module_path(),
    )


def _proc(name: str) -> str:
    try:
        with open(f"/proc/thread-self/{name}") as file:
            return file.read()
    except OSError:
        return ""
