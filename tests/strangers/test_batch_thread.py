"""An error of the thread that sends the rounds of a batch reaches all who wait, and the next call has a new thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from parallelformers_ng import parallelize
from parallelformers_ng.batching.queue import Queue
from parallelformers_ng.errors import BatchingError
from tests.strangers.agreement import NEW_TOKENS, assert_agree, assert_agree_in_a_batch, prompt
from tests.zoo.decoders import decoder

WAIT = {"timeout": 20.0}


@pytest.mark.parametrize("method", ["_next_round", "_take", "_measure"])
def test_an_error_of_the_thread_ends_all_calls_at_once(groups, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=groups(2), batching=True)
    original: Any = getattr(Queue, method)

    def fail(queue: Queue, *args: Any) -> Any:
        if queue._running or queue._waiting:
            raise KeyError("a bug")
        return original(queue, *args)

    monkeypatch.setattr(Queue, method, fail)
    errors: list[Any] = []

    def call(seed: int) -> None:
        with pytest.raises(BatchingError, match="KeyError: 'a bug'") as caught:
            cut.generate(prompt(5, seed), **NEW_TOKENS, **WAIT)
        errors.append(caught.value)

    begun = time.monotonic()
    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert time.monotonic() - begun < WAIT["timeout"] / 2
    monkeypatch.undo()
    assert_agree_in_a_batch(cut, whole, [prompt(5), prompt(7, seed=2)])
    cut.deparallelize()


def test_a_thread_that_cannot_start_is_the_error_of_its_call_alone(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=groups(2), batching=True)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "batch":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cut.generate(prompt(5), **NEW_TOKENS, **WAIT)
    monkeypatch.undo()
    assert_agree(cut, whole, prompt(5))
    cut.deparallelize()
