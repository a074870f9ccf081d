"""From the first worker of a group to its end: whether requests can be served, and what callers are told if not."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import NoReturn

from parallelformers_ng.runtime import deaths
from parallelformers_ng.runtime.deaths import Ending
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.turns import Turns


class Lifetime:
    """Whether a group lives, and why not.

    The workers are ended when it says so, at interpreter exit, and when the group is dropped without being closed.

    Args:
        processes: the workers.
        turns: those of the group's requests.
        device_names: of each rank, for messages.

    Attributes:
        owner: id of the process that started the group; in any other it is of no use.
    """

    def __init__(self, processes: Processes, turns: Turns, device_names: Sequence[str]) -> None:
        self.owner = os.getpid()
        self._processes = processes
        self._device_names = device_names
        self._ending: Ending | None = None
        self._finalizer = weakref.finalize(self, _finish, processes, turns)

    @property
    def is_over(self) -> bool:
        """True once the group has a reason to be of no further use. A death that nobody has noticed yet is none."""
        return self._ending is not None

    @property
    def has_workers(self) -> bool:
        """True until the workers have been ended."""
        return self._finalizer.alive

    @property
    def alive(self) -> bool:
        """True while requests can be served."""
        if self.is_over or os.getpid() != self.owner:
            return False
        return not any(worker.has_ended() for worker in self._processes.workers)

    def check_process(self) -> None:
        """Raise WrongProcessError in any process but the one that started the group."""
        if os.getpid() != self.owner:
            raise deaths.wrong_process(self.owner, os.getpid())

    def check_usable(self) -> None:
        """Raise what callers are told where the group is over, or belongs to another process."""
        if os.getpid() == self.owner and self._ending is None and self._finalizer.alive:
            return
        self.check_process()
        if self._ending is not None:
            raise self._ending()
        if not self.has_workers:
            if threading.current_thread().daemon:
                threading.Event().wait()  # the interpreter is about to freeze it for good; an error would be noise
            raise deaths.at_exit()

    def note(self, ending: Ending) -> Ending:
        """From here on, calls are told `ending`. Where there is a reason already, that stays, and is returned."""
        self._ending = self._ending or ending
        return self._ending

    def end_workers(self) -> None:
        """End the workers. Does nothing the second time."""
        self._finalizer()

    def end(self, ending: Ending) -> Ending:
        """The group is dead from here on. Returns why: where it was closed or died before, that stays the reason."""
        reason = self.note(ending)
        self.end_workers()
        return reason

    def fail(self, ending: Ending) -> NoReturn:
        """End the group and raise why."""
        raise self.end(ending)() from None

    def death_of(self, rank: int) -> Ending:
        """The end of a group whose worker of `rank` has ended."""
        return self._processes.workers[rank].death(self._device_names[rank])


def _finish(processes: Processes, turns: Turns) -> None:
    """End the processes, unless a daemon thread has a request in flight at interpreter exit. That thread must not wake
    up to an error; the workers end by themselves, with this process."""
    if turns.acquire(timeout=0.0):
        processes.end()
