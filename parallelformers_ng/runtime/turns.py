"""First come, first served: `threading.Lock` alone lets late callers overtake."""

from __future__ import annotations

import threading
from collections import deque

from parallelformers_ng.wire.interrupts import LetThrough


class Turns:
    """A lock that threads get in the order in which they asked for it.

    A signal can interrupt the wait, and nothing else where the caller is in a `Held` block. A turn belongs to its
    thread from the moment it is passed on, so who was interrupted releases it all the same.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[threading.Lock, int]] = deque()
        self._owner: int | None = None

    def is_mine(self) -> bool:
        """True where the calling thread has the turn."""
        return self._owner == threading.get_ident()

    def acquire(self, timeout: float) -> bool:
        """Wait for the turn; who has it already need not wait.

        Args:
            timeout: seconds; may be infinite.

        Returns:
            False where the time passed first.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                return True
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((gate, me))
        try:
            with LetThrough():
                gate.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        finally:
            with self._mutex:
                if (gate, me) in self._waiting:
                    self._waiting.remove((gate, me))
        # A turn that was granted in the very moment of giving up is a turn all the same, to be passed on.
        return self.is_mine()

    def release(self) -> None:
        """Pass the turn on to whoever has waited longest. Does nothing where it is not the calling thread's."""
        with self._mutex:
            if self._owner != threading.get_ident():
                return
            if self._waiting:
                gate, self._owner = self._waiting.popleft()
                gate.release()
            else:
                self._owner = None
