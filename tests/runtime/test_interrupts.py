"""Tests that the next answer is right after Ctrl-C, or another raising signal handler, at any moment of a request."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from benchmarks.chaos_interrupts import interrupts_at_random
from parallelformers_ng import parallelize
from parallelformers_ng.model.parallelized import deployment_of
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2


def test_interrupt_at_any_step_keeps_the_group(groups):
    """The test interrupts between two bytecodes of the package, like a signal, for a sample of all bytecodes."""
    group, missed = groups(2), []
    # A call polls for its answer: the later the answer comes, the more steps the call has.
    steps = min(10**6 - _strike_at(10**6, lambda: group.call("caches.held")) for _ in range(9))
    for step in sorted(random.Random(0).sample(range(1, steps), 60)):
        try:
            _strike_at(step, lambda: group.call("caches.held"))
            missed.append(step)
        except KeyboardInterrupt:
            pass
        assert group.call_each("caches.held", [()] * 2) == [0, 0], step
    assert len(missed) < 10, "most calls have at least as many steps as the shortest of nine"


def _strike_at(step: int, call: Callable[[], Any]) -> int:
    """Raise SIGINT in this thread before bytecode number `step` of a call. Returns how many bytecodes the call had too
    few."""
    left, mine = step, f"{os.sep}parallelformers_ng{os.sep}"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if mine not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if not left and event == "opcode":
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left


def test_a_short_storm_of_interrupts(groups):
    report = interrupts_at_random(40, seed=1, group=groups(2))
    assert (report.lost, report.wrong, report.errors) == (0, 0, [])
    assert report.interrupted == 40


def test_finalizer_of_a_handle_loses_no_interrupt(groups):
    """Python prints and drops an exception in a finalizer, so an interrupt in a finalizer could be lost."""
    model = parallelize(gpt2(), workers=groups(2))
    steps = []

    def trace(frame: FrameType, event: str, _: Any) -> None:
        steps.append(frame.f_code.co_qualname)

    cache = model(token_ids(rows=1), use_cache=True).past_key_values
    before = sys.gettrace()
    sys.settrace(trace)
    del cache
    sys.settrace(before)
    assert not steps
    model(token_ids(rows=1), use_cache=False)
    assert deployment_of(model).replicas[0].ready(float("inf"))[0].call("caches.held") == 0
    model.deparallelize()
