"""Keeps a group running: notices at once that a busy or idle worker has ended, and replaces the whole group."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from parallelformers_ng.errors import DeadlineExpiredError, RestartLimitError
from parallelformers_ng.runtime.group import WorkerGroup

log = logging.getLogger("parallelformers_ng")

_RETRY_SECONDS = 0.5  # pause before the next attempt to start a group


class Supervisor:
    """Provides a running group. After `supervise`, a thread replaces the group whenever a worker has ended.

    The thread has only a weak reference to the supervisor. If the supervisor is garbage-collected, its group and its
    thread end.

    Attributes:
        current: the group, and its incarnation: the number of groups before it.
        answered: latest incarnation that has answered a call, or the first one. The first call after a restart runs
            without CUDA graphs, so that its answer waits for no recordings and trials.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.current, self.answered = (group, 0), 0
        self._restarts: deque[float] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._given_up = ""  # why the group will not be replaced again; "" before the limit of restarts
        self._failure = ""  # why the latest attempt to start a group failed
        self._thread: threading.Thread | None = None

    @property
    def group(self) -> WorkerGroup:
        return self.current[0]

    @property
    def incarnation(self) -> int:
        return self.current[1]

    def supervise(self, revive: Callable[[], WorkerGroup], max_restarts: int, restart_window: float) -> None:
        """Start a thread that replaces the group whenever a worker has ended."""
        self._revive = revive
        self._max_restarts, self._restart_window = max_restarts, restart_window
        # Groups end in an exit handler, and must not be replaced then. Exit handlers run in reverse order of
        # registration, so register `_stop_all` last.
        if not _running:
            atexit.unregister(_stop_all)
            atexit.register(_stop_all)
        _running.add(self)
        arguments = (weakref.ref(self), self.group.wait_until_over)
        name = "parallelformers_ng-supervisor"
        self._thread = threading.Thread(target=_supervise, args=arguments, name=name, daemon=True)
        self._thread.start()

    def ready(self, deadline: float | None = None) -> tuple[WorkerGroup, int, float]:
        """Return the running group, its incarnation, and the deadline; while a new group starts, wait for it.

        Without `supervise`, or after `close`, the returned group may have died; a call of that group raises the reason.
        """
        group = self.group
        group.check_process()
        deadline = group.deadline() if deadline is None else deadline
        if self._thread is not None and not group.alive:
            self._await_group(deadline)
        return *self.current, deadline

    def _await_group(self, deadline: float) -> None:
        with self._changed:
            while not (self._stopped or self.group.alive):
                if self._given_up:
                    raise RestartLimitError(self._given_up)
                remaining_seconds = deadline - time.monotonic()
                if remaining_seconds <= 0:
                    raise DeadlineExpiredError("the workers died, and new workers were not ready before the deadline")
                self._changed.wait(min(remaining_seconds, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """End the group, and do not replace it. If a new group is starting, wait for it and end it. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.group.close()
        if self._thread is not None:
            self._thread.join()

    def replace(self) -> bool:
        """Replace the ended group, and return whether this succeeded. Only the supervising thread may call this method.

        A failed start is logged and repeated after 0.5 s, up to the limit of restarts.
        """
        ended, incarnation = self.current
        why = ended.error()
        while not self._stopped and self._may_restart():
            began = time.monotonic()
            self._restarts.append(began)
            try:
                group = self._revive()
            except Exception as error:  # a start may raise any error, and the next start may succeed
                self._failure = _described(error)
                if not self._stopped:
                    log.warning("%s; the workers could not be started again: %s", why, self._failure)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped, _RETRY_SECONDS)
                continue
            with self._changed:
                if not self._stopped:
                    self._failure = ""
                    self.current = (group, incarnation + 1)
                    self._changed.notify_all()
                    log.warning("%s; all workers were started again in %.1f s", why, time.monotonic() - began)
                    return True
            group.close()
        return False

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._restart_window:
            self._restarts.popleft()
        if len(self._restarts) < self._max_restarts:
            return True
        within = f"within {self._restart_window:g} s (the limit is {self._max_restarts} restarts, see max_restarts)"
        count = len(self._restarts)
        reason = f"the workers died {count + 1} times {within} and are not restarted again"
        if self._failure:
            reason = f"the workers died, and the last of {count} restarts {within} failed with: {self._failure}"
        text = f"{reason}; model.deparallelize() returns the weights to this process"
        with self._changed:
            self._given_up = text
            self._changed.notify_all()
        log.error("%s", text)
        return False


def _described(error: Exception) -> str:
    """Return the text of a failed start. For an ImportError, name the entries of `sys.path` that no longer exist."""
    gone = [entry for entry in sys.path if not os.path.exists(entry) and not entry.startswith(sys.base_prefix)]
    if isinstance(error, ImportError) and gone:
        return f"{error} (sys.path names {', '.join(gone)}, which is gone)"
    return str(error)


_running: weakref.WeakSet[Supervisor] = weakref.WeakSet()


def _stop_all() -> None:
    for supervisor in list(_running):
        supervisor._stopped = True


def _supervise(reference: weakref.ref[Supervisor], wait_until_over: Callable[[], None]) -> None:
    goes_on = True
    while goes_on:
        wait_until_over()
        supervisor = reference()
        if supervisor is None:
            return
        goes_on = supervisor.replace()
        wait_until_over = supervisor.group.wait_until_over
        del supervisor  # so that the supervisor can be garbage-collected during the wait
