"""Worker processes as the parent sees them: started, watched, ended, and closed in forked children."""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.errors import (
    ChannelClosedError,
    GroupClosedError,
    GroupError,
    RequestTimeoutError,
    StartupError,
    WorkerDiedError,
    WrongProcessError,
)
from parallelformers_ng.wire.format import Kind
from parallelformers_ng.wire.transport import Channel

# -P: a torch.py or random.py in the current folder must not be found before the real one. -u: what a worker prints
# is seen even if it is killed right after.
_COMMAND = (sys.executable, "-P", "-u", "-m", "parallelformers_ng.runtime.worker")
_TAIL_BYTES = 8192
_EXIT_SECONDS = 1.0  # between the end of a worker's socket and the end of the worker
_REAP_SECONDS = 5.0  # a killed process is gone in milliseconds unless a driver blocks it


Why = Callable[[], GroupError]


class WorkerGoneError(GroupError):
    """A worker ended, or hung up, in the middle of a request. Callers get a WorkerDiedError in its place."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the worker of rank {rank} is gone")
        self.rank = rank


class WorkerProcess:
    """One worker, from the parent's side.

    Args:
        rank: its rank.
        threads: for the OpenMP and BLAS libraries of the worker.
        cpus: the CPUs it is pinned to; by default those of this process.

    Raises:
        StartupError: the interpreter could not be started, or this process may open no more files.
    """

    def __init__(self, rank: int, threads: int, cpus: set[int] | None = None) -> None:
        if not sys.executable:
            raise StartupError("sys.executable is empty, so there is no interpreter to start the workers with")
        self.rank = rank
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            try:
                self.log = os.memfd_create(f"parallelformers_ng-stderr-{rank}", os.MFD_CLOEXEC)
                ours.callback(os.close, self.log)
                connection, their_connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                ours.enter_context(connection)
                theirs.enter_context(their_connection)
                their_lifeline, self.lifeline = os.pipe()  # nothing is ever written; see worker.py
                ours.callback(os.close, self.lifeline)
                theirs.callback(os.close, their_lifeline)
                self.process = self._start((their_connection.fileno(), their_lifeline), threads)
                ours.callback(self.process.wait)
                ours.callback(self.process.kill)
                self.pid = self.process.pid
                if cpus is not None:
                    with contextlib.suppress(ProcessLookupError):  # it has ended, which the wait for it will show
                        os.sched_setaffinity(self.pid, cpus)  # threads that it starts later inherit this
                self.pidfd = os.pidfd_open(self.pid)
            except OSError as error:
                raise StartupError(f"rank {rank}: {sys.executable} could not be started: {error}") from error
            ours.pop_all()
        self.channel = Channel(connection)

    def _start(self, inherited: tuple[int, int], threads: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*_COMMAND, *map(str, inherited), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stderr=self.log,
            pass_fds=inherited,
            env=_environment(threads),
            # Ctrl-C is for the parent alone. A session of its own would see to that, too; but the kernel may schedule
            # sessions as groups (autogroup), between which sched_yield does not give way: a process that spins would
            # keep the core.
            process_group=0,
        )

    def has_ended(self, timeout: float = 0.0) -> bool:
        """True once the process is gone, waiting for that up to `timeout` seconds."""
        pidfd = self.pidfd  # read once: another thread may be closing it
        if pidfd < 0:
            return True
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(max(timeout, 0.0) * 1000))

    def kill(self) -> None:
        """End the process at once; one that is stopped, too."""
        if not self.has_ended():
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def request_traceback(self) -> None:
        """Have a worker that is starting write to its standard error where in the code it is."""
        if not self.has_ended():
            signal.pidfd_send_signal(self.pidfd, signal.SIGUSR1)

    def reap(self) -> int | None:
        """Collect a killed process. Returns its code as subprocess counts them, or None where it still hangs."""
        return self.process.wait(_REAP_SECONDS) if self.has_ended(_REAP_SECONDS) else None

    def exit_status(self) -> tuple[int | None, int | None]:
        """(signal, exit code) of a worker that ended, one of them None. One that lingers is killed."""
        if not self.has_ended(_EXIT_SECONDS):
            self.kill()
        code = self.reap()
        return (-code, None) if code is not None and code < 0 else (None, code)

    def death(self, device_name: str) -> Callable[[], WorkerDiedError]:
        """What to raise, once or often, about a worker that ended."""
        signal, code = self.exit_status()
        manner = f"signal {signal}" if signal else f"exit code {code}"
        hint = "; the kernel's memory killer sends signal 9, see dmesg" if signal == 9 else ""
        text = (
            f"the worker of rank {self.rank} (pid {self.pid}, {device_name}) died: {manner}{hint}; "
            "tensor-parallel ranks live and die together, so its group has ended"
        )
        return functools.partial(WorkerDiedError, text, self.rank, signal, code)

    def startup_log(self) -> str:
        """The end of what the worker wrote to standard error before it was ready."""
        size = os.fstat(self.log).st_size
        start = max(0, size - _TAIL_BYTES)
        return os.pread(self.log, size - start, start).decode(errors="replace")

    def close(self) -> None:
        """Close this process's descriptors of the worker."""
        self.channel.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self.log)
            os.close(self.lifeline)
            self.pidfd = self.log = self.lifeline = -1


class Processes:
    """All workers of a group and the arena they share: what must be given back, however the group ends.

    Args:
        arena: the collectives' shared memory.
        device_names: of each rank, for messages.

    Attributes:
        owner: id of the process that started them; in any other they are of no use.
        why_over: makes the error that callers get, once there is a reason for one. A death that nobody has noticed yet
            is none.
        ended: no request can be sent any more.
    """

    def __init__(self, arena: Arena, device_names: Sequence[str]) -> None:
        self.workers: list[WorkerProcess] = []
        self.why_over: Why | None = None
        self.ended = False
        self._device_names = device_names
        self.arena = arena
        self.rendezvous: int | None = None
        self.owner = os.getpid()
        self._ending = threading.Lock()
        self._descriptors = threading.Lock()  # locked while they are closed, or used by a thread that did not open them
        self._closed = False
        _live.add(self)

    def check_process(self) -> None:
        """Raise WrongProcessError in any process but the one that started the workers."""
        if os.getpid() != self.owner:
            raise WrongProcessError(
                f"this worker group belongs to process {self.owner}, this is {os.getpid()}; a forked process must "
                "parallelize the model itself (gunicorn: without --preload; multiprocessing: start method 'spawn')"
            )

    def raise_why_over(self) -> NoReturn:
        """Raise what callers are told whose group is over, or belongs to another process."""
        self.check_process()
        if self.why_over is not None:
            raise self.why_over()
        if threading.current_thread().daemon:
            threading.Event().wait()  # the interpreter is about to freeze it for good; an error would be noise
        raise GroupClosedError("the worker group has ended, because the interpreter is shutting down")

    def end_because(self, cause: GroupError) -> Why:
        """End every worker. Returns what makes the error that callers get from here on: the first reason stays.

        Args:
            cause: what they are told; a WorkerGoneError becomes the WorkerDiedError of its worker.
        """
        if isinstance(cause, WorkerGoneError):
            why: Why = self.workers[cause.rank].death(self._device_names[cause.rank])
        else:
            why = functools.partial(type(cause), *cause.args)
        self.why_over = self.why_over or why
        self.end()
        return self.why_over

    def kill(self) -> None:
        """Kill every worker, and leave the rest to the thread that waits for them."""
        with self._descriptors:
            if not self._closed:
                self.arena.abort()
                for worker in self.workers:
                    worker.kill()

    def dismiss(self, patience: float) -> None:
        """Ask the workers, all idle, to leave, and end as `end` does. Those that are gone or stuck end without asking.

        Args:
            patience: seconds that they get.
        """
        try:
            for worker in self.workers:
                worker.channel.send(Kind.GOODBYE, 0, None, time.monotonic() + patience)
        except (ChannelClosedError, RequestTimeoutError, ValueError):
            return
        self.end(patience)

    def end(self, patience: float = 0.0) -> None:
        """End every worker and close everything. Does nothing the second time, or in a forked child.

        Args:
            patience: seconds that workers get to leave by themselves.
        """
        if os.getpid() != self.owner or not self._ending.acquire(blocking=False):
            return
        self.ended = True
        deadline = time.monotonic() + patience
        if not all(worker.has_ended(deadline - time.monotonic()) for worker in self.workers):
            self.kill()
        for worker in self.workers:
            worker.reap()
        with self._descriptors:
            self.close()

    def close(self) -> None:
        """Close this process's descriptors and mappings, without touching the workers."""
        self._closed = True
        if self.rendezvous is not None:
            os.close(self.rendezvous)
            self.rendezvous = None
        for worker in self.workers:
            worker.close()
        self.arena.close()
        _live.discard(self)


_live: weakref.WeakSet[Processes] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    # As long as a copy of the sockets is open somewhere, the workers do not see that their parent is gone.
    for processes in list(_live):
        processes.close()


os.register_at_fork(after_in_child=_close_in_forked_child)


def _environment(threads: int) -> dict[str, str]:
    """The worker's own copy of the environment. The parent's stays as it is."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # A set of strings that a caller's processor goes through has the same order on every rank.
    environment.setdefault("PYTHONHASHSEED", "0")
    # A pass over a long prompt asks for the same few megabytes again and again; given back to the system in between,
    # every page would be cleared and mapped anew. 32 MiB is the most that glibc takes.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(32 << 20))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(256 << 20))
    # Enough to find this package and torch; the exact list follows in the first message.
    environment["PYTHONPATH"] = os.pathsep.join(module_path())
    return environment


def module_path() -> list[str]:
    """`sys.path`, with the current folder under its full name."""
    return [os.path.abspath(entry) for entry in sys.path]
