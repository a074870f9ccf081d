"""Ctrl-C, and other signals whose handlers raise, at any moment of a request: the next answer is right."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

from benchmarks.chaos_interrupts import interrupts_at_random
from parallelformers_ng import parallelize
from parallelformers_ng.errors import RequestTimeoutError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.wire import interrupts
from parallelformers_ng.wire.frame import Kind
from parallelformers_ng.wire.interrupts import CriticalSection, InterruptPoint
from parallelformers_ng.wire.message import encode, pack
from parallelformers_ng.wire.transport import Channel
from tests.zoo.case import token_ids
from tests.zoo.decoders import gpt2


class Alarm(Exception):
    pass


@pytest.fixture(params=[signal.SIGINT, signal.SIGALRM], ids=lambda number: number.name)
def number(request):
    """A signal whose handler raises Alarm."""

    def ring(*_: Any) -> None:
        raise Alarm

    before = signal.signal(request.param, ring)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_waits_for_the_end_of_the_block(number):
    handler, steps = signal.getsignal(number), []

    def struck() -> None:
        with CriticalSection():
            signal.raise_signal(number)
            with CriticalSection():
                steps.append("within")
            steps.append("still within")

    with pytest.raises(Alarm):
        struck()
    assert steps == ["within", "still within"]
    assert signal.getsignal(number) is handler


def test_a_signal_is_let_through_and_what_cleans_up_after_it_is_not_struck(number):
    steps = []

    def struck_twice() -> None:
        with CriticalSection():
            try:
                with InterruptPoint():
                    signal.raise_signal(number)
                    steps.append("not reached")
            finally:
                signal.raise_signal(number)
                steps.append("cleaned up")

    with pytest.raises(Alarm):
        struck_twice()
    assert steps == ["cleaned up"]


def test_a_signal_that_waits_is_let_through_before_the_wait(number):
    begun = []

    def wait() -> None:
        with CriticalSection():
            signal.raise_signal(number)
            with InterruptPoint():
                begun.append("the wait")

    with pytest.raises(Alarm):
        wait()
    assert not begun


def test_a_handler_that_only_notes_is_called_once_and_interrupts_nothing(number):
    noted: list[int] = []
    signal.signal(number, lambda number, frame: noted.append(number))
    with CriticalSection():
        signal.raise_signal(number)
        assert not noted
        with InterruptPoint():
            assert noted == [number]
            signal.raise_signal(number)
            with CriticalSection():  # as of another model, which the program's own code calls
                signal.raise_signal(number)
                assert len(noted) == 2
            assert len(noted) == 3
    assert noted == [number] * 3


def test_a_handler_that_the_program_sets_meanwhile_stays(number):
    with CriticalSection(), InterruptPoint():
        signal.signal(number, signal.SIG_IGN)
    assert signal.getsignal(number) is signal.SIG_IGN


def test_other_threads_are_left_alone(number):
    handler, seen = signal.getsignal(number), []

    def work() -> None:
        with CriticalSection(), InterruptPoint():
            seen.append(signal.getsignal(number))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_frame_is_taken_and_sent_on_after_an_interruption():
    """The deadline stands for the signal: what it raises leaves the wait in the same way."""
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    value = ["x" * (1 << 20), torch.arange(99), "end"]
    packed = pack(Kind.EVENT, 5, encode(value))
    with pytest.raises(RequestTimeoutError):
        sender.send_packed(packed, deadline=0.0)
    assert sender.sent != 5
    with pytest.raises(RequestTimeoutError):
        receiver.receive(deadline=0.0)
    thread = threading.Thread(target=sender.send_packed, args=(packed,))
    thread.start()
    kind, sequence, (text, tensor, end) = receiver.recv()
    thread.join()
    assert (kind, sequence, text, tensor.tolist(), end) == (Kind.EVENT, 5, value[0], list(range(99)), "end")
    assert sender.sent == 5
    sender.send(Kind.EVENT, 6, "next")
    assert receiver.recv() == (Kind.EVENT, 6, "next")
    sender.close()
    receiver.close()


def test_no_step_of_a_request_loses_the_group(groups):
    """Struck between two bytecodes of the package, as a signal strikes; of all there are, a sample."""
    group, missed = groups(2), []
    # A call looks out for its answer: the later that comes, the more steps it has.
    steps = min(10**6 - _strike_at(10**6, lambda: group.call("held_caches")) for _ in range(9))
    for step in sorted(random.Random(0).sample(range(1, steps), 60)):
        try:
            _strike_at(step, lambda: group.call("held_caches"))
            missed.append(step)
        except KeyboardInterrupt:
            pass
        assert group.call_each("held_caches", [()] * 2) == [0, 0], step
    assert len(missed) < 10, "few calls have fewer steps than the shortest of nine"


def _strike_at(step: int, call: Callable[[], Any]) -> int:
    """Raise SIGINT in this thread before one of the bytecodes of a call. Returns how many there were too few."""
    left, mine = step, f"{os.sep}parallelformers_ng{os.sep}"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if mine not in frame.f_code.co_filename or frame.f_code.co_filename == interrupts.__file__:
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
    found = interrupts_at_random(40, seed=1, group=groups(2))
    assert (found.lost, found.wrong, found.errors) == (0, 0, [])
    assert found.interrupted == 40


def test_a_handle_that_goes_takes_no_step_in_which_an_interrupt_is_lost(groups):
    """What is raised in a finalizer is printed and dropped."""
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
    assert deployment_of(model).replicas[0].ready(float("inf"))[0].call("held_caches") == 0
    model.deparallelize()
