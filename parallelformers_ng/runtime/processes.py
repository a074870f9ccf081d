"""The worker processes of a group: ended together, and closed in forked children."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NoReturn, Protocol

from parallelformers_ng.errors import (
    ChannelClosedError,
    GroupClosedError,
    GroupError,
    RequestTimeoutError,
    WrongProcessError,
)
from parallelformers_ng.runtime.worker_process import WorkerGoneError
from parallelformers_ng.wire.frame import FrameKind
from parallelformers_ng.wire.transport import Channel

Why = Callable[[], GroupError]


class Worker(Protocol):
    """A rank's process as a running group uses it: `WorkerProcess` says what is what."""

    rank: int
    channel: Channel

    @property
    def pid(self) -> int: ...

    @property
    def pidfd(self) -> int: ...

    def has_ended(self, timeout: float = 0.0) -> bool: ...

    def kill(self) -> None: ...

    def exit_status(self) -> tuple[int | None, int | None]: ...

    def reap(self) -> object: ...

    def death(self, device_name: str) -> Why: ...

    def close(self) -> None: ...


class Steering(Protocol):
    """The parent's control of running collectives; see `Arena`."""

    @property
    def aborted(self) -> bool: ...

    def abort(self, reason: str = ...) -> None: ...

    def request_cancel(self, sequence: int) -> None: ...

    def reset(self) -> None: ...

    def close(self) -> None: ...


class RankStarter(Steering, Protocol):
    """Starts and steers ranks that are not children of this process.

    Attributes:
        names, counts: names of the hosts, and number of ranks of each, once these are ready.
        are_here: whether all ranks are on one host, and it is this machine.
        launch: same as `startup.launch`, without an arena.
    """

    @property
    def names(self) -> list[str]: ...

    @property
    def counts(self) -> list[int]: ...

    @property
    def are_here(self) -> bool: ...

    @property
    def launch(self) -> Callable[..., Callable[[], None]]: ...


class Processes:
    """All workers of a group and the arena they share: what must be given back, however the group ends.

    Args:
        arena: the collectives' shared memory, or what stands for that of several hosts.
        device_names: device of each rank, for messages.

    Attributes:
        owner: id of the process that started them; in any other they are of no use.
        why_over: makes the error that callers get, once there is a reason for one. A death that nobody has noticed yet
            is none.
        ended: no request can be sent any more.
    """

    def __init__(self, arena: Steering, device_names: Sequence[str]) -> None:
        self.workers: list[Worker] = []
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

    def note_reason(self, cause: GroupError) -> None:
        """Have callers get an error from here on. The first reason stays.

        Args:
            cause: error for the callers; a WorkerGoneError becomes the WorkerDiedError of its worker.
        """
        if isinstance(cause, WorkerGoneError):
            why: Why = self.workers[cause.rank].death(self._device_names[cause.rank])
        else:
            why = functools.partial(type(cause), *cause.args)
        self.why_over = self.why_over or why

    def end_because(self, cause: GroupError) -> None:
        """End every worker, for a reason that `note_reason` takes."""
        self.note_reason(cause)
        self.end()

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
                worker.channel.send(FrameKind.GOODBYE, 0, None, time.monotonic() + patience)
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
        self.arena.close()  # first, as it may have a thread that tells of the ends of workers
        for worker in self.workers:
            worker.close()
        _live.discard(self)


_live: weakref.WeakSet[Processes] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    # As long as a copy of the sockets is open somewhere, the workers do not see that their parent is gone.
    for processes in list(_live):
        processes.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
