"""Tests that an error in a batch's bookkeeping reaches all waiting calls, but does not affect the group or later
calls."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from parallelformers_ng import parallelize
from parallelformers_ng.batching.batch import Batch
from parallelformers_ng.batching.scheduler import Scheduler
from parallelformers_ng.errors import BatchingError
from tests.strangers.agreement import NEW_TOKENS, assert_agree_in_a_batch, prompt
from tests.zoo.decoders import decoder

WAIT = {"timeout": 20.0}


@pytest.mark.parametrize(("kind", "method"), [(Batch, "next_round"), (Batch, "take"), (Scheduler, "learn_room")])
def test_error_of_the_batch_ends_all_calls(groups, monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> None:
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=groups(2), batching=True)
    original: Any = getattr(kind, method)

    def fail(part: Any, *args: Any) -> Any:
        if not isinstance(part, Batch) or part.busy:
            raise KeyError("a bug")
        return original(part, *args)

    monkeypatch.setattr(kind, method, fail)
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
