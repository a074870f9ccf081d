"""First come, first served: `threading.Lock` alone lets late callers overtake."""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    """A lock that threads get in the order in which they asked for it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._owner: int | None = None

    def is_mine(self) -> bool:
        """True where the calling thread has the turn."""
        return self._owner == threading.get_ident()

    def acquire(self, timeout: float) -> bool:
        """Wait for the turn.

        Args:
            timeout: seconds; may be infinite.

        Returns:
            False where the time passed first.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner is None:
                self._owner = me
                return True
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            granted = gate.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        except BaseException:
            if not self._withdraw(gate):
                self.release()
            raise
        # A turn that was granted in the very moment of giving up is a turn all the same.
        if not granted and self._withdraw(gate):
            return False
        self._owner = me
        return True

    def release(self) -> None:
        """Pass the turn on to whoever has waited longest."""
        with self._mutex:
            if self._waiting:
                self._owner = _PASSED_ON
                self._waiting.popleft().release()
            else:
                self._owner = None

    def _withdraw(self, gate: threading.Lock) -> bool:
        with self._mutex:
            if gate not in self._waiting:
                return False
            self._waiting.remove(gate)
            return True


_PASSED_ON = 0  # no thread has this identifier
