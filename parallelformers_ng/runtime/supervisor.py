"""Keeps a group running: a worker that ends, busy or idle, is noticed at once, and the group replaced as a whole."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from parallelformers_ng.errors import DeadlineExpiredError, GroupError, RestartLimitError
from parallelformers_ng.runtime.group import WorkerGroup

log = logging.getLogger("parallelformers_ng")

Revive = Callable[[], WorkerGroup]

_RETRY_SECONDS = 0.5  # between attempts to start a group, when one failed


@dataclass(frozen=True)
class RestartLimit:
    """How many restarts within how many seconds are an accident; one more is a storm, and the group stays down."""

    count: int = 3
    seconds: float = 60.0


class Supervisor:
    """Hands out a living group, which it has replaced in the background when a worker ended.

    The thread that does so starts here and has but a weak reference to the supervisor: one that is dropped takes its
    group and its thread along.

    Args:
        group: a group that runs.
        revive: starts a group that can take the place of `group`, ready for requests. None: it is never replaced.
        limit: when to give up.

    Attributes:
        current: the group, alive or not, and its incarnation: how often the group was replaced. If that group is not
            alive, `ready` says which to use.
    """

    def __init__(self, group: WorkerGroup, revive: Revive | None = None, limit: RestartLimit | None = None) -> None:
        self.current = (group, 0)
        self._revive = revive
        self._limit = limit or RestartLimit()
        self._restarts: deque[float] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._given_up: Callable[[], GroupError] | None = None
        self._thread: threading.Thread | None = None
        if revive is not None:
            self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._close_wakeup = weakref.finalize(self, os.close, self._wakeup)
            _stop_at_exit(self)
            self._thread = threading.Thread(
                target=_supervise,
                args=(weakref.ref(self), self._wakeup, group.watch_descriptors()),
                name="parallelformers_ng-supervisor",
                daemon=True,
            )
            self._thread.start()

    @property
    def group(self) -> WorkerGroup:
        """The group, alive or not."""
        return self.current[0]

    def ready(self, deadline: float) -> tuple[WorkerGroup, int]:
        """Return the group to send a request to and its incarnation. While one is being started, wait for it.

        Args:
            deadline: on the clock of `time.monotonic`, in seconds.

        Raises:
            DeadlineExpiredError: no group was ready before the deadline.
            RestartLimitError: the workers died too often, or cannot be started; for good.
            WrongProcessError: this is a forked process.
        """
        group = self.group
        group.check_process()
        if self._revive is None or group.alive:
            return self.current
        with self._changed:
            while not self.current[0].alive:
                if self._given_up is not None:
                    raise self._given_up()
                if self._stopped:
                    return self.current  # its group says why it cannot be used
                rest = deadline - time.monotonic()
                if rest <= 0:
                    raise DeadlineExpiredError("the workers died, and new ones were not ready before the deadline")
                self._changed.wait(min(rest, threading.TIMEOUT_MAX))
            return self.current

    def stop(self) -> None:
        """Replace the group no more. A replacement that is under way is waited for, and ended. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None and self._close_wakeup.alive and os.getpid() == self.group.owner:
            os.eventfd_write(self._wakeup, 1)
            self._thread.join()
            self._close_wakeup()

    def replace(self) -> list[int]:
        """In the supervising thread: put a new group in the place of one that has ended.

        Returns:
            Descriptors that become readable when a worker of the new group ends; none if there is no new group.
        """
        assert self._revive is not None, "without it there is no supervising thread"
        ended, incarnation = self.current
        ended.wait_until_over()
        why = ended.why_over()
        while not self._stopped and self._may_restart():
            began = time.monotonic()
            self._restarts.append(began)
            try:
                group = self._revive()
                descriptors = group.watch_descriptors()
            except Exception as error:  # whatever the reason, callers are told
                self._note_failure(why, error)
                continue
            with self._changed:
                if not self._stopped:
                    self.current = (group, incarnation + 1)
                    self._changed.notify_all()
                    log.warning("%s; all workers were started again in %.1f s", why, time.monotonic() - began)
                    return descriptors
            _close(descriptors)
            group.close()
        return []

    def _note_failure(self, why: str, error: Exception) -> None:
        if not self._stopped:
            log.warning("%s; the workers could not be started again: %s", why, error)
        wait = select.poll()
        wait.register(self._wakeup, select.POLLIN)
        wait.poll(_RETRY_SECONDS * 1000)

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._limit.seconds:
            self._restarts.popleft()
        if len(self._restarts) < self._limit.count:
            return True
        text = (
            f"the workers died {len(self._restarts) + 1} times within {self._limit.seconds:g} s (the limit is"
            f" {self._limit.count} restarts, see max_restarts) and stay down; model.deparallelize() gives the weights"
            " back"
        )
        with self._changed:
            self._given_up = functools.partial(RestartLimitError, text)
            self._changed.notify_all()
        log.error("%s", text)
        return False


_running: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _stop_at_exit(supervisor: Supervisor) -> None:
    """At interpreter exit the groups end, which must not look like an accident."""
    if not _running:
        # Groups end in an exit handler, too, and the last one registered runs first: theirs is there once a group is.
        atexit.unregister(_stop_all)
        atexit.register(_stop_all)
    _running.add(supervisor)


def _stop_all() -> None:
    for supervisor in list(_running):
        supervisor._stopped = True


def _supervise(reference: weakref.ref[Supervisor], wakeup: int, descriptors: list[int]) -> None:
    """Wait for the end of a worker, replace the group, and again: the supervising thread."""
    while descriptors:
        poll = select.poll()
        for fd in (wakeup, *descriptors):
            poll.register(fd, select.POLLIN)
        poll.poll()
        _close(descriptors)
        supervisor = reference()
        if supervisor is None or supervisor._stopped:
            return
        descriptors = supervisor.replace()
        del supervisor  # if its owner dropped it meanwhile, it ends here


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
