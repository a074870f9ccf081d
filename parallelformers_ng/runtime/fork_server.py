"""A process that has imported all that ranks need, and forks them: N ranks import once, and later ones not at all.

There is one for each caller's process, started with its first group or by `warm_up`. It has one thread, runs no kernel
and touches no device, so a fork of it is as good as a fresh process, and is there in milliseconds. Both halves are in
this file: `ForkServer` in the caller, and `main`, the loop of the server.
"""

from __future__ import annotations

import array
import contextlib
import errno
import gc
import importlib
import logging
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from typing import NoReturn

from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.runtime import worker
from parallelformers_ng.runtime.spawn import Link, Spawned, environment_of_worker, is_readable, module_path, send_signal

log = logging.getLogger("parallelformers_ng")

SWITCH = "PARALLELFORMERS_NG_FORK_SERVER"
"""The environment variable that, set to 0, has every rank started as a fresh process."""

_IMPORTS = "parallelformers_ng.worker.imports"
# Read when Python starts or a library is imported, so that a fork has what they were then.
_READ_AT_START = (
    "ATEN_", "BLIS_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_",
    "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SSL_", "TORCH", "TRANSFORMERS_", "TZ",
)  # fmt: skip
_INHERITED = ("Uid", "Gid", "Groups", "Umask", "Cap", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed")
_NUMBER = struct.Struct("<i")
_HANDED_OVER = 6  # descriptors of a request, in the order of `Fork`
_REAP_SECONDS = 5.0


class Fork:
    """A rank that a server was asked for, a `Process`.

    Raises:
        OSError: this process may open no more files.
    """

    def __init__(self, server: ForkServer, link: Link) -> None:
        self.pid: int | None = None
        self.pidfd = -1
        self._code: int | None = None
        self._server: ForkServer | None = server  # which lives as long as its ranks
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self._report, their_report = socket.socketpair()
            ours.enter_context(self._report)
            theirs.enter_context(their_report)
            folder = os.open(".", os.O_PATH | os.O_DIRECTORY)
            theirs.callback(os.close, folder)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            theirs.callback(os.close, nowhere)
            output = 1 if os.path.exists("/proc/self/fd/1") else nowhere
            descriptors = [*link.theirs, link.log, output, folder, their_report.fileno()]
            with contextlib.suppress(BrokenPipeError):  # the server has ended, which the wait for its answer will show
                socket.send_fds(server.link.connection, [b"f"], descriptors, socket.MSG_NOSIGNAL)
            ours.pop_all()

    def await_start(self, deadline: float) -> bool:
        """As `Process` says; False where the server is gone."""
        if self.pid or self._server is None:
            return bool(self.pid)
        if not is_readable(self._report.fileno(), deadline - time.monotonic()):
            raise RequestTimeoutError(f"the fork server (pid {self._server.pid}) has not forked it yet")
        message, descriptors, *_ = socket.recv_fds(self._report, _NUMBER.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not message:
            return False
        number = _NUMBER.unpack(message)[0]
        if number > 0 and not descriptors:  # dropped on the way, for want of a free number
            number = -errno.EMFILE
        if number < 0:
            raise OSError(-number, os.strerror(-number))
        self.pid, self.pidfd = number, descriptors[0]
        return True

    def exit_code(self, seconds: float) -> int | None:
        """As `Process` says; None also where the server is gone, which alone could tell."""
        if self._code is None and is_readable(self._report.fileno(), seconds):
            message = self._report.recv(_NUMBER.size)
            self._code = _NUMBER.unpack(message)[0] if message else None
        return self._code

    def close(self) -> None:
        """As `Process` says. A rank that was asked for and is not there yet ends with its lifeline."""
        self._report.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        self._server = None


class ForkServer:
    """A server, from the caller's side. It ends when neither this process nor a rank of it has any use for it.

    Args:
        inheritance: what its forks have of this process as it is.

    Attributes:
        link: joins it to this process; ranks are asked for over its socket.

    Raises:
        OSError, StartupError: it could not be started.
    """

    def __init__(self, inheritance: object) -> None:
        self.inheritance = inheritance
        self.link = Link("fork-server")
        try:
            # Whether there are devices, an import may ask; it is then told by NVML, after which a fork may use them.
            environment = environment_of_worker(threads=1) | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            self._process = Spawned(__name__, self.link, environment)
        except BaseException:
            self.link.close()
            raise
        self.link.hand_over()
        self.pid = self._process.pid
        self._shown = 0
        self._end = weakref.finalize(self, _end, self._process, self.link)
        _all.add(self)

    def exit_code(self) -> int | None:
        """Its code as subprocess counts them, once it has ended: negative where it was killed, positive where it has
        found that it must not fork."""
        return self._process.exit_code(0.0)

    def request_traceback(self) -> None:
        """Have it write to its log where in the code it is."""
        send_signal(self._process.pidfd, signal.SIGUSR1)

    def new_log(self) -> str:
        """What it has written to its log since this was last asked."""
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


def running() -> ForkServer | None:
    """The server to ask for ranks, started where there is none whose forks would be like fresh processes; None where
    ranks have to be started as fresh processes."""
    global _newest
    if os.environ.get(SWITCH) == "0":
        return None
    with _lock:
        inheritance = _inheritance()
        if _newest is not None and _newest.inheritance == inheritance:
            code = _newest.exit_code()
            if code is None:
                return _newest
            if code > 0:  # another would find the same
                return None
        try:
            _newest = ForkServer(inheritance)
        except Exception as error:
            log.debug("the fork server could not be started: %s", error)
            return None
        return _newest


def warm_up() -> None:
    """Start importing what workers need, in a process beside this one, so that the first `parallelize` finds it done.

    Returns at once. Whoever knows that a model is about to be parallelized calls it first, then loads the model.
    """
    running()


def _end(process: Spawned, link: Link) -> None:
    """End a server that has no ranks: the kernel kills it when its lifeline closes."""
    link.close()
    process.exit_code(_REAP_SECONDS)
    process.close()


def _forget_in_forked_child() -> None:
    # As long as a copy of the lifeline is open somewhere, the server does not see that its parent is gone.
    global _newest, _lock
    _newest, _lock = None, threading.Lock()
    for server in list(_all):
        server.forget()


os.register_at_fork(after_in_child=_forget_in_forked_child)


def _inheritance() -> tuple[object, ...]:
    """What a process that this thread starts has of it, apart from what every request hands over."""
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


# -- In the server ----------------------------------------------------------------------------------------------------


def main() -> None:
    """Import what ranks need, then fork on request until the caller is gone."""
    control, lifeline, caller = (int(argument) for argument in sys.argv[1:])
    worker.end_with_lifeline(lifeline)
    watched = worker.open_parent(caller), os.pidfd_open(os.getpid())
    worker.set_signals()
    gc.disable()
    importlib.import_module(_IMPORTS)
    if reason := _why_no_forks():
        print(reason, file=sys.stderr)
        sys.exit(1)
    # What is there now stays for good. Unless the collector leaves it alone, its first pass in a rank writes to every
    # page of it, and nothing is shared any more.
    gc.collect()
    gc.freeze()
    _Server(socket.socket(fileno=control), lifeline, watched).serve()


def _why_no_forks() -> str | None:
    import torch

    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        return f"an import has started {threads - 1} threads, which a fork would lack"
    pid = os.fork()
    if pid == 0:  # only here does torch know
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(pid, 0)[1]:
        return "an import has asked CUDA for devices, which a fork could not use then"
    return None


class _Server:
    """The loop of the server.

    Args:
        requests: where the caller asks for ranks.
        lifeline: the reading end of the pipe that the kernel watches.
        watched: pidfds of the caller and of this process, which ranks watch.
    """

    def __init__(self, requests: socket.socket, lifeline: int, watched: tuple[int, int]) -> None:
        self._requests = requests
        self._lifeline = lifeline
        self._watched = watched
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # pidfd → process id, and where its end is reported
        self._poll = select.poll()
        for fd in (requests.fileno(), watched[0]):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._watched[0]:
                    return
                if fd in self._ranks:
                    self._report_end(fd)
                elif not self._answer():
                    return

    def _answer(self) -> bool:
        """Fork a rank. Returns False when there are no more requests."""
        message, descriptors, *_ = socket.recv_fds(self._requests, 1, _HANDED_OVER, socket.MSG_CMSG_CLOEXEC)
        if message and len(descriptors) == _HANDED_OVER:
            *rank, report_fd = descriptors
            self._fork(rank, socket.socket(fileno=report_fd))
            descriptors = rank
        for fd in descriptors:  # too few where this process may open no more files: the caller sees the other end close
            os.close(fd)
        return bool(message)

    def _fork(self, descriptors: Sequence[int], report: socket.socket) -> None:
        try:
            pid = os.fork()
            if pid == 0:
                self._become_rank(descriptors, report)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            self._send(report, -(error.errno or errno.EAGAIN))
            report.close()
            return
        self._ranks[pidfd] = pid, report
        self._poll.register(pidfd, select.POLLIN)
        self._send(report, pid, [pidfd])

    def _report_end(self, pidfd: int) -> None:
        pid, report = self._ranks.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        self._send(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        report.close()

    @staticmethod
    def _send(report: socket.socket, number: int, descriptors: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with contextlib.suppress(OSError):  # the caller wants it no more
            report.sendmsg([_NUMBER.pack(number)], ancillary, socket.MSG_NOSIGNAL)

    def _become_rank(self, descriptors: Sequence[int], report: socket.socket) -> NoReturn:
        """In the fork: be what a fresh process would be, and go on as one."""
        try:
            control, lifeline, errors, output, folder = descriptors
            for pidfd, (_, other) in self._ranks.items():
                os.close(pidfd)
                other.close()
            report.close()
            self._requests.close()
            os.close(self._lifeline)
            os.setpgid(0, 0)  # as `spawn` does
            os.fchdir(folder)
            os.dup2(output, 1)
            os.dup2(errors, 2)
            for fd in (errors, output, folder):
                os.close(fd)
            sys.argv = [worker.__file__, str(control), str(lifeline), sys.argv[3]]
            _renew_state()
            worker.run(control, lifeline, self._watched)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)


def _renew_state() -> None:
    """What a fresh process starts with, and a fork would have of the server. `random` sees to itself."""
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    importlib.invalidate_caches()  # files may have come since
    gc.enable()


if __name__ == "__main__":
    main()
