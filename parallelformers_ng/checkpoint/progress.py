"""One progress bar for whatever moves weights: bytes done, rate, and what is left."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

Progress = Callable[[int], object]
"""Called with the bytes that were just done."""


@contextlib.contextmanager
def progress_bar(what: str, total: int, show: bool = True) -> Iterator[Progress]:
    """A bar on standard error, silent where that is not a terminal.

    Args:
        what: "loading", "cutting", "saving" or "gathering", and of which model.
        total: bytes.
        show: False silences it everywhere.
    """
    silent = not show or sys.stderr is None or not sys.stderr.isatty()
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, unit_divisor=1000, disable=silent, leave=False) as bar:
        yield bar.update
