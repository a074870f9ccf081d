"""Pauses a group, so that it serves no requests within a block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.request import Request
from tests.helpers.patience import PROMPTLY


class _Pause(Request):
    def __init__(self, resume: threading.Event) -> None:
        super().__init__("pause", ())
        self.resume = resume

    def prepare(self) -> bool:
        self.resume.wait(PROMPTLY)
        return False


@contextlib.contextmanager
def paused(group: WorkerGroup) -> Iterator[threading.Event]:
    """Pause the group within the block, until the yielded event is set."""
    resume = threading.Event()
    group.submit(_Pause(resume))
    try:
        yield resume
    finally:
        resume.set()
