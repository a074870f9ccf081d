"""Runs the thread of a group, which sends the requests of all other threads to the workers, one after another."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from parallelformers_ng.errors import ChannelClosedError, DeadlineExpiredError, GroupError, RequestTimeoutError
from parallelformers_ng.runtime.exchange import STRAGGLER_SECONDS, Exchange, Request
from parallelformers_ng.runtime.processes import Processes

GOODBYE_SECONDS = 2.0  # time that idle workers get to exit after the group was closed


class RequestLoop:
    """Serves requests in the order of their arrival, until the group ends. The loop has no reference to the
    `WorkerGroup`, so that the group can be garbage-collected.

    Args:
        processes: the workers, which are ready before `start` is called.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._later: list[Callable[[], object]] = []
        self._patience = 0.0
        self._thread = threading.Thread(target=self._run, name="parallelformers_ng-group", daemon=True)

    def start(self) -> None:
        """Start the thread that serves requests.

        Raises:
            OSError: this process cannot open more files.
        """
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Any thread may write to the eventfd, so close the eventfd only after this object is freed. Do not close it at
        # interpreter exit, because `leave` still writes to it then.
        weakref.finalize(self, os.close, self._wakeup).atexit = False
        self._exchange = Exchange(self._processes, self._wakeup)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._current is not None or bool(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; if the group has ended, the request gets None as its last item. Any thread may call this."""
        self._waiting.append(request)
        os.eventfd_write(self._wakeup, 1)
        if self._processes.ended:  # the thread may not look at the queue any more
            self._fail_waiting()

    def do_later(self, function: Callable[[], object]) -> None:
        """Have the group's thread call a function after it has sent the next request, or when no request is waiting."""
        self._later.append(function)

    def give_up(self, request: Request) -> None:
        """Cancel a request whose caller no longer waits. Ranks stop a running request at their next step."""
        request.given_up = True
        request.discard()
        os.eventfd_write(self._wakeup, 1)

    def stop(self, patience: float = 0.0) -> None:
        """End the workers, and wait for their end. Waiting and running requests end with an error.

        Args:
            patience: seconds that idle workers get to exit by themselves.
        """
        if not self._thread.is_alive():
            self._processes.end()
            return
        self._patience = patience
        os.eventfd_write(self._wakeup, 1)
        self.join()

    def join(self) -> None:
        """Wait until the group's thread has ended all workers, after one worker has died."""
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def leave(self) -> None:
        """End the workers after their group was garbage-collected, or at interpreter exit.

        At interpreter exit a daemon thread may still wait for a request, and must not get an error. Workers that run a
        request are therefore not ended here; the workers end with this process.
        """
        if os.getpid() == self._processes.owner:
            self._processes.ended = True
            if not self.busy:
                self.stop()

    def _run(self) -> None:
        last: RequestTimeoutError | None = None
        try:
            while self._next():
                self._serve(self._waiting.popleft())
            if self._patience:
                self._processes.dismiss(self._patience)
        except RequestTimeoutError:
            assert self._current is not None, "only a running request can be late"
            last = self._late(self._current)
        except ChannelClosedError:
            self._processes.note_death(self._exchange.partner.rank)
        except GroupError as error:
            self._processes.note_reason(error)
        except BaseException as error:
            self._processes.note_reason(GroupError(f"the thread of the group failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._processes.end()
            if self._current is not None:
                self._current.put(last)
                self._current = None
            self._fail_waiting()
            self._run_later_functions()

    def _next(self) -> bool:
        """Wait for a request; return False if the group has ended."""
        while self._processes.why_over is None and not self._processes.ended:
            if self._waiting:
                return True
            self._run_later_functions()
            self._exchange.sleep()
        return False

    def _serve(self, request: Request) -> None:
        self._current, request.begun = request, True
        if request.given_up or time.monotonic() >= request.deadline:
            request.put(expired(request))
        elif request.prepare():
            self._exchange.run(request, self._run_later_functions)
        self._current = None  # drop the reference, which may keep the group alive

    def _run_later_functions(self) -> None:
        later, self._later = self._later, []
        for function in later:
            function()

    def _late(self, request: Request) -> RequestTimeoutError:
        """Note that the group ends because of a late request, and return the error of that request."""
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
        self._processes.note_reason(GroupError(why))
        return RequestTimeoutError(f"{text}; the workers were ended. Allow more time with timeout=")

    def _fail_waiting(self) -> None:
        """End all waiting requests with None, which means that the group has ended."""
        while self._waiting:
            try:
                self._waiting.popleft().put(None)
            except IndexError:  # another thread was faster
                return


def expired(request: Request) -> DeadlineExpiredError:
    """Return the error of a request whose deadline passed before it was sent."""
    return DeadlineExpiredError(
        f"{request.method!r} did not start within {request.seconds:.3g} s; the workers were busy with other calls"
    )
