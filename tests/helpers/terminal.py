"""Runs a terminal session with a Python REPL."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time
from types import TracebackType


class Terminal:
    """A Python REPL on a separate pseudo-terminal.

    Args:
        environment: environment variables of the interpreter.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            basic = {"TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
            os.execve(sys.executable, [sys.executable, "-q", "-i"], {**environment, **basic})

    def read_until(self, pattern: str, seconds: float) -> str:
        """Return the terminal's output up to `pattern`, which must come in time."""
        seen, end = "", time.monotonic() + seconds
        while not re.search(pattern, seen):
            assert select.select([self._fd], [], [], max(0.0, end - time.monotonic()))[0], f"no {pattern!r} in {seen!r}"
            seen += os.read(self._fd, 1 << 16).decode(errors="replace")
        return seen

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)
