"""Limits the calls that one thread makes to parallelized models: by a deadline, or by a cancellation from another
thread."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from parallelformers_ng.errors import DeadlineExpiredError, RequestCancelledError
from parallelformers_ng.option_checks import checked_seconds

# Deadline of this thread or asyncio task, in seconds of `time.monotonic`.
thread_deadline: ContextVar[float] = ContextVar("parallelformers_ng_deadline", default=math.inf)


@contextlib.contextmanager
def set_within(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Limit all calls inside the `with` block to `seconds` in total, counted from the start of the block.

    Example: `with deadline(2.0): model(**inputs)`. A call that is running at the deadline raises RequestTimeoutError; a
    call that starts later raises DeadlineExpiredError and is not sent. If a call is running at the deadline, the
    workers end, unless the call is a `generate` that shares a batch. The deadline applies to this thread or asyncio
    task. In nested blocks the earlier deadline applies.

    Args:
        seconds: positive number of seconds; infinity sets no deadline.

    Raises:
        ParallelError: `seconds` is not a positive number.
    """
    end = time.monotonic() + checked_seconds(seconds, "deadline")
    with set_within(thread_deadline, min(thread_deadline.get(), end)):
        yield


@contextlib.contextmanager
def turn(lock: threading.RLock, latest: float, late: str) -> Iterator[None]:
    """Hold a lock inside the `with` block. If the lock is not free by `latest`, raise DeadlineExpiredError(late)."""
    if not lock.acquire(timeout=min(max(0.0, latest - time.monotonic()), threading.TIMEOUT_MAX)):
        raise DeadlineExpiredError(late)
    try:
        yield
    finally:
        lock.release()


class Cancellation:
    """Lets one thread cancel the requests of another thread."""

    def __init__(self) -> None:
        self.asked = False
        # `cancel` sets `asked` and then calls `wake`. So a thread that is about to sleep sets `wake` first, then checks
        # `asked`.
        self.wake: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        """Cancel the requests: the thread of the requests raises RequestCancelledError at its next `check`."""
        self.asked = True
        self.wake()

    def check(self) -> None:
        if self.asked:
            raise cancellation_error()


def cancellation_error() -> RequestCancelledError:
    return RequestCancelledError("the request was cancelled by its caller")


_cancellation: ContextVar[Cancellation | None] = ContextVar("parallelformers_ng_cancellation", default=None)


def cancellation_of_thread() -> Cancellation:
    """Return the cancellation of this thread's requests; outside of `cancelled_by`, return a new, unused object."""
    return _cancellation.get() or Cancellation()


def cancelled_by(cancellation: Cancellation) -> contextlib.AbstractContextManager[None]:
    """Make requests of this thread inside the `with` block cancellable by `cancellation`.

    A cancelled request raises RequestCancelledError. A `generate` in a shared batch checks the cancellation by itself.
    Any other request is cancelled only if a streamer of the request calls `Cancellation.check`.
    """
    return set_within(_cancellation, cancellation)
