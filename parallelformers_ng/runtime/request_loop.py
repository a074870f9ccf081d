"""The thread of a group: it alone talks to the workers, and serves the requests of all other threads in turn."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from parallelformers_ng.errors import DeadlineExpiredError, GroupError, RequestTimeoutError
from parallelformers_ng.runtime.exchange import STRAGGLER_SECONDS, Exchange, Request
from parallelformers_ng.runtime.processes import Processes

GOODBYE_SECONDS = 2.0


class RequestLoop:
    """Serves requests in the order in which they come, until the group ends. It knows nothing of the group, which may
    be dropped.

    Args:
        processes: the workers, all ready once `start` is called.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._later: list[Callable[[], object]] = []
        self._patience = 0.0
        self._thread = threading.Thread(target=self._run, name="parallelformers_ng-group", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not sooner, as any thread may write to it; nor at the interpreter's end, where `leave` comes after it.
        weakref.finalize(self, os.close, self._wakeup).atexit = False
        self._exchange = Exchange(self._processes, self._wakeup)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """True while a request waits or is served."""
        return self._current is not None or bool(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)
        os.eventfd_write(self._wakeup, 1)
        if self._processes.ended:  # the thread may have looked for the last time
            self._leave_the_rest()

    def do_later(self, function: Callable[[], object]) -> None:
        """In the thread of the group: call a function once the workers have something to do, or nothing is left."""
        self._later.append(function)

    def give_up(self, request: Request) -> None:
        """Have a request end, whose caller waits no more. If the ranks run it, they leave it at their next step."""
        request.given_up = True
        request.discard()
        os.eventfd_write(self._wakeup, 1)

    def stop(self, patience: float = 0.0) -> None:
        """End the workers, and wait until they have ended. Requests that wait or are served are told so.

        Args:
            patience: seconds that idle workers get to leave by themselves.
        """
        if not self._thread.is_alive():
            self._processes.end()
            return
        self._patience = patience
        os.eventfd_write(self._wakeup, 1)
        self.join()

    def join(self) -> None:
        """Wait until the workers have ended, of which one has died."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def leave(self) -> None:
        """End workers that nobody can ask any more: their group was dropped, or the interpreter ends. In that case a
        daemon thread may have a request in flight: it must not wake up to an error, and the workers end by themselves,
        with this process."""
        if os.getpid() == self._processes.owner:
            self._processes.ended = True
            if not self.busy:
                self.stop()

    def _run(self) -> None:
        try:
            while self._next():
                self._serve(self._waiting.popleft())
            if self._patience:
                self._processes.dismiss(self._patience)
        except RequestTimeoutError:
            assert self._current is not None, "it is late"
            self._end_late(self._current)
        except GroupError as error:
            self._processes.end_because(error)
        except BaseException as error:
            self._processes.end_because(GroupError(f"the thread of the group failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._processes.end()
            if self._current is not None:
                self._current.put(None)
                self._current = None
            self._leave_the_rest()
            self._do_the_rest()

    def _next(self) -> bool:
        """Wait for a request. Returns False if the group is over."""
        while self._processes.why_over is None and not self._processes.ended:
            if self._waiting:
                return True
            self._do_the_rest()
            self._exchange.sleep()
        return False

    def _serve(self, request: Request) -> None:
        self._current, request.begun = request, True
        if request.given_up or time.monotonic() >= request.deadline:
            request.put(expired(request))
        elif request.prepare():
            self._exchange.run(request, self._do_the_rest)
        self._current = None  # no frame of this thread keeps what it refers to, maybe the group

    def _do_the_rest(self) -> None:
        later, self._later = self._later, []
        for function in later:
            function()

    def _end_late(self, request: Request) -> None:
        text = (
            f"{request.method!r} ran past its deadline of {request.seconds:.3g} s;"
            f" no answer from ranks {self._exchange.unanswered}"
        )
        why = f"the worker group was ended, because an earlier request {text}"
        if request.given_up:
            why = (
                "the worker group was ended: the workers did not leave an interrupted request within"
                f" {STRAGGLER_SECONDS:g} s; parallelize the model again to use it"
            )
        self._processes.end_because(GroupError(why))
        request.put(RequestTimeoutError(f"{text}; its workers were ended. Allow more time with timeout="))

    def _leave_the_rest(self) -> None:
        """Tell the callers of all requests that wait that the group is over."""
        while self._waiting:
            try:
                self._waiting.popleft().put(None)
            except IndexError:  # another thread was faster
                return


def expired(request: Request) -> DeadlineExpiredError:
    """Return the error of a request that did not get its turn."""
    return DeadlineExpiredError(
        f"{request.method!r} did not get its turn within {request.seconds:.3g} s; other calls keep the workers"
    )
