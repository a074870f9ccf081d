"""Lets one thread cancel the requests of another thread to parallelized models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from parallelformers_ng.errors import RequestCancelledError


class Cancellation:
    """A switch with which one thread cancels the requests of another thread.

    Attributes:
        asked: whether `cancel` was called.
        wake: function that `cancel` calls. A thread that is about to sleep sets `wake` first and then checks `asked`.
    """

    def __init__(self) -> None:
        self.asked = False
        self.wake: Callable[[], object] = lambda: None

    def cancel(self) -> None:
        """Cancel the requests: the thread of the requests raises RequestCancelledError at its next `check`."""
        self.asked = True
        self.wake()

    def check(self) -> None:
        """Raise RequestCancelledError if `cancel` was called."""
        if self.asked:
            raise cancellation_error()


def cancellation_error() -> RequestCancelledError:
    """Return the error of a request that its caller has cancelled."""
    return RequestCancelledError("the request was cancelled by its caller")


_of_thread: ContextVar[Cancellation | None] = ContextVar("parallelformers_ng_cancellation", default=None)


def cancellation_of_thread() -> Cancellation:
    """Return the cancellation of this thread's requests; outside of `cancelled_by`, return a new, unused object."""
    return _of_thread.get() or Cancellation()


@contextlib.contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Make requests of this thread inside the `with` block cancellable by `cancellation`.

    A cancelled request raises RequestCancelledError. A `generate` in a shared batch checks the cancellation by itself.
    Any other request is cancelled only if a streamer of the request calls `Cancellation.check`.
    """
    token = _of_thread.set(cancellation)
    try:
        yield
    finally:
        _of_thread.reset(token)
