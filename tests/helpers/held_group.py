"""Keeps a group from serving requests for a while."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from parallelformers_ng.runtime.exchange import Request
from parallelformers_ng.runtime.group import WorkerGroup
from tests.helpers.patience import PROMPTLY


class _Held(Request):
    def __init__(self, let_go: threading.Event) -> None:
        super().__init__("held", ())
        self.let_go = let_go

    def prepare(self) -> bool:
        self.let_go.wait(PROMPTLY)
        return False


@contextlib.contextmanager
def held(group: WorkerGroup) -> Iterator[threading.Event]:
    """Within it the group serves nothing, until the event is set."""
    let_go = threading.Event()
    group.submit(_Held(let_go))
    try:
        yield let_go
    finally:
        let_go.set()
