"""Sets a deadline for all calls that one thread makes to parallelized models, also for calls without `timeout=`."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

from parallelformers_ng.errors import DeadlineExpiredError
from parallelformers_ng.option_checks import checked_seconds

thread_deadline: ContextVar[float] = ContextVar("parallelformers_ng_deadline", default=math.inf)
"""Deadline of this thread or asyncio task, in seconds of `time.monotonic`."""


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
    token = thread_deadline.set(min(thread_deadline.get(), time.monotonic() + checked_seconds(seconds, "deadline")))
    try:
        yield
    finally:
        thread_deadline.reset(token)


@contextlib.contextmanager
def turn(lock: threading.RLock, latest: float, late: str) -> Iterator[None]:
    """Hold a lock in this context, after a wait for other threads.

    Args:
        lock: the lock.
        latest: latest moment to get the lock, in seconds of `time.monotonic`.
        late: message of the error.

    Raises:
        DeadlineExpiredError: other threads still held the lock at `latest`.
    """
    if not lock.acquire(timeout=min(max(0.0, latest - time.monotonic()), threading.TIMEOUT_MAX)):
        raise DeadlineExpiredError(late)
    try:
        yield
    finally:
        lock.release()
