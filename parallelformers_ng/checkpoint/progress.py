"""Shows the progress of loading, saving and gathering weights: bytes done, bytes per second, and total bytes."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator

from tqdm import tqdm

Progress = Callable[[int], object]  # called with the number of bytes done since the last call

log = logging.getLogger("parallelformers_ng")
_SECONDS = 5.0  # least time between two log lines, which replace the bar if standard error is no terminal


@contextlib.contextmanager
def progress_bar(what: str, total: int, show: bool = True) -> Iterator[Progress]:
    """Show a progress bar if standard error is a terminal, else log a line at most every 5 seconds."""
    if show and (sys.stderr is None or not sys.stderr.isatty()):
        yield _Lines(what, total).update
        return
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=not show, leave=False) as bar:
        yield bar.update


class _Lines:
    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._last = time.monotonic(), 0

    def update(self, size: int) -> None:
        self._done += size
        (when, before), now = self._last, time.monotonic()
        if now - when >= _SECONDS:
            rate = (self._done - before) / (now - when) / 1e6
            log.info("%s: %.1f of %.1f GB, %.0f MB/s", self._what, self._done / 1e9, self._total / 1e9, rate)
            self._last = now, self._done
