"""A deadline for everything that one thread asks of parallelized models, for calls that take no `timeout=`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar

from parallelformers_ng.options import checked_seconds

thread_deadline: ContextVar[float] = ContextVar("parallelformers_ng_deadline", default=math.inf)
"""Of this thread or asyncio task, on the clock of `time.monotonic`."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Let every call within the block raise RequestTimeoutError once `seconds` have passed since its beginning. A call
    that is made later raises DeadlineExpiredError, and is not sent.

    `with deadline(2.0): model(**inputs)`. It holds for this thread or asyncio task; of nested ones, the
    earlier counts.

    Args:
        seconds: more than 0; infinite is none.

    Raises:
        ParallelError: `seconds` is no such number.
    """
    token = thread_deadline.set(min(thread_deadline.get(), time.monotonic() + checked_seconds(seconds, "deadline")))
    try:
        yield
    finally:
        thread_deadline.reset(token)
