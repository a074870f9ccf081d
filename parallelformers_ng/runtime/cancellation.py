"""Ends what one thread asks of parallelized models, from another thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from parallelformers_ng.errors import RequestCancelledError


class Cancellation:
    """A word from one thread to another: what you wait for is not wanted any more.

    Attributes:
        asked: whether it was said.
        wake: called when it is said; whoever sleeps sets it first, and looks at `asked` afterwards.
    """

    def __init__(self) -> None:
        self.asked = False
        self.wake: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        """Say it. The other thread raises RequestCancelledError at its next check."""
        self.asked = True
        self.wake()

    def check(self) -> None:
        if self.asked:
            raise cancellation_error()


def cancellation_error() -> RequestCancelledError:
    """Ends a request that its caller has cancelled."""
    return RequestCancelledError("the request was cancelled by its caller")


_of_thread: ContextVar[Cancellation | None] = ContextVar("parallelformers_ng_cancellation", default=None)


def cancellation_of_thread() -> Cancellation:
    """Return a switch that cancels the requests of this thread."""
    return _of_thread.get() or Cancellation()


@contextlib.contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Within it, requests of this thread can be cancelled."""
    token = _of_thread.set(cancellation)
    try:
        yield
    finally:
        _of_thread.reset(token)
