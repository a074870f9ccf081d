"""Tests the deadlines of a thread."""

from __future__ import annotations

import math
import threading

from parallelformers_ng import deadline
from parallelformers_ng.runtime.limits import thread_deadline


def test_earlier_of_nested_deadlines_applies() -> None:
    with deadline(60.0):
        outer = thread_deadline.get()
        with deadline(600.0):
            assert thread_deadline.get() == outer
        with deadline(1.0):
            assert thread_deadline.get() < outer
        assert thread_deadline.get() == outer
    assert thread_deadline.get() == math.inf


def test_other_threads_have_no_deadline() -> None:
    seen: list[float] = []
    with deadline(60.0):
        thread = threading.Thread(target=lambda: seen.append(thread_deadline.get()))
        thread.start()
        thread.join()
    assert seen == [math.inf]
