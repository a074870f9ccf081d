"""Manages the worker processes of a group: ends all workers together, and closes descriptors in forked children."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from parallelformers_ng.errors import GroupClosedError, GroupError, WrongProcessError
from parallelformers_ng.runtime.records import RankRecords
from parallelformers_ng.runtime.worker_process import Worker
from parallelformers_ng.wire.frame import FrameKind


class Processes:
    """The worker processes of a group and their shared arena, all of which end together.

    Attributes:
        arena: the `Arena` of the collectives; for ranks that agents start, their `Hosts`, which has the same methods.
        quiet_cpus: CPUs on which no rank spins, for the group's thread; empty if there are none, or if the ranks may
            run on any CPU.
        why_over: function that returns the error for callers; None as long as the group can serve calls, as far as
            this process has noticed.
    """

    def __init__(self, arena: Any, device_names: Sequence[str]) -> None:
        self.workers: Sequence[Worker] = []
        self.why_over: Callable[[], GroupError] | None = None
        self.ended = False
        self._device_names = device_names
        self.arena = arena
        self.rendezvous: int | None = None
        self.records: RankRecords | None = None
        self.quiet_cpus: set[int] = set()
        self.owner = os.getpid()
        self._ending = threading.Lock()
        self._descriptors = threading.Lock()  # held while descriptors are closed, or used by other threads
        self._closed = False
        _live.add(self)

    def check_process(self) -> None:
        if os.getpid() != self.owner:
            raise WrongProcessError(
                f"this worker group belongs to process {self.owner}, this is process {os.getpid()}; a forked process "
                "must parallelize the model itself (gunicorn: without --preload; multiprocessing: start method 'spawn')"
            )

    def raise_why_over(self) -> NoReturn:
        """Raise the reason why the group cannot serve a call: the group has ended, or belongs to another process.

        In a daemon thread at interpreter exit, wait forever instead.
        """
        self.check_process()
        if self.why_over is not None:
            raise self.why_over()
        if threading.current_thread().daemon:
            threading.Event().wait()  # at interpreter exit, nobody could act on an error
        raise GroupClosedError("the worker group has ended, because the interpreter is shutting down")

    def note_reason(self, cause: GroupError) -> None:
        self.why_over = self.why_over or functools.partial(type(cause), *cause.args)

    def note_death(self, rank: int) -> None:
        self.why_over = self.why_over or self.workers[rank].death(self._device_names[rank])

    def kill(self) -> None:
        """Abort the collectives and kill all workers. The thread that waits for the workers then closes descriptors."""
        with self._descriptors:
            if not self._closed:
                self.arena.abort()
                for worker in self.workers:
                    worker.kill()

    def dismiss(self, patience: float) -> None:
        """Send all workers, which must be idle, a message to exit; then call `end`.

        If the message cannot be sent to a worker, return at once, without calling `end`.
        """
        try:
            for worker in self.workers:
                worker.channel.send(FrameKind.GOODBYE, 0, None, time.monotonic() + patience)
        except (GroupError, ValueError):
            return
        self.end(patience)

    def end(self, patience: float = 0.0) -> None:
        """End all workers and close all descriptors. Does nothing at a second call, or in a forked child."""
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
        if self.records is not None:
            self.records.close()

    def close(self) -> None:
        """Close this process's descriptors and mappings, without ending the workers."""
        self._closed = True
        if self.rendezvous is not None:
            os.close(self.rendezvous)
            self.rendezvous = None
        self.arena.close()  # close the arena first, because its thread may still report ends of workers
        for worker in self.workers:
            worker.close()
        _live.discard(self)


_live: weakref.WeakSet[Processes] = weakref.WeakSet()


def _close_in_forked_child() -> None:
    # Close the child's copies of the sockets: with open copies, workers would not notice the end of their parent.
    for processes in list(_live):
        processes.close()


os.register_at_fork(after_in_child=_close_in_forked_child)
