"""Ctrl-C in the middle of a request: it waits, microseconds mostly, for a moment at which nothing can be torn.

Python runs the handler of a signal between any two steps of the main thread. What it raises there could be lost between
a system call and the note of what that did, and the streams to the workers would be out of step for good. So within a
`CriticalSection` a stand-in takes the place of the program's handlers: it notes the signal, and calls the handler where
the section ends, or at the next `InterruptPoint`. Those are around every wait and around the program's own code, at
points from which the exchange with the workers can be taken up again.

Other threads are never interrupted by signals; for them all of this does nothing.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from signal import getsignal
    from signal import signal as set_handler
else:  # without the search for a member of an enum, which takes those of `signal` 20 µs
    from _signal import getsignal
    from _signal import signal as set_handler

_RAISING = (int(signal.SIGALRM), int(signal.SIGINT))  # whose handlers usually raise: time-outs, and Ctrl-C


class _StandIn:
    """Stands in for the handlers of the program. Only the main thread uses it.

    Attributes:
        depth: how many critical sections the main thread is in, one within another.
        interruptible: whether it is at an interrupt point.
        pending: signals whose handlers wait.
    """

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.depth = 0
        self.interruptible = False
        self.pending: list[int] = []
        self._handlers: dict[int, Any] = {}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.depth and not self.interruptible:
            self.pending.append(number)
            return
        # The code that cleans up after what the handler raises must not be interrupted as well.
        before, self.interruptible = self.interruptible, False
        self._handlers[number](number, frame)
        self.interruptible = before

    def install(self) -> None:
        for number in _RAISING:
            handler: Any = getsignal(number)
            if handler is self:  # what its removal raised came before it was done
                continue
            if callable(handler):
                self._handlers[number] = handler
                set_handler(number, self)
            else:
                self._handlers.pop(number, None)

    def remove(self) -> None:
        for number, handler in self._handlers.items():
            placed: Any = set_handler(number, handler)
            if placed is not self:  # the program has set another meanwhile
                set_handler(number, placed)

    def deliver(self) -> None:
        """Call the handlers of pending signals."""
        pending, self.pending = self.pending, []
        for number in dict.fromkeys(pending):
            self(number, sys._getframe(1))


_stand_in = _StandIn()


class CriticalSection:
    """A block in which handlers that raise interrupt the main thread at an `InterruptPoint` alone."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        stand_in = _stand_in
        if get_ident() != stand_in.thread:
            self._before: bool | None = None
            return
        self._before = stand_in.interruptible
        if not stand_in.depth:
            # Until the last line below the stand-in changes nothing: it calls the program's handlers at once.
            try:
                stand_in.install()
            except BaseException:
                stand_in.remove()
                raise
        stand_in.interruptible = False
        stand_in.depth += 1

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        stand_in = _stand_in
        stand_in.interruptible = self._before
        stand_in.depth -= 1
        try:
            if not stand_in.depth:
                stand_in.remove()
        finally:
            if stand_in.pending and (stand_in.interruptible or not stand_in.depth):
                stand_in.deliver()


class InterruptPoint:
    """A block within a `CriticalSection` in which handlers run as ever. What they raise ends both."""

    __slots__ = ("_opens",)

    def __enter__(self) -> None:
        self._opens = bool(_stand_in.depth) and get_ident() == _stand_in.thread and not _stand_in.interruptible
        if self._opens:
            _stand_in.interruptible = True
            if _stand_in.pending:
                _stand_in.deliver()

    def __exit__(self, *_: object) -> None:
        if self._opens:
            _stand_in.interruptible = False


def _renew_after_fork() -> None:
    """The thread that forked is the child's main thread."""
    _stand_in.thread = threading.main_thread().ident


os.register_at_fork(after_in_child=_renew_after_fork)
