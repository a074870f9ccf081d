"""Tests that a call's timeout covers the proof that it waits for."""

from __future__ import annotations

import threading
import time

import pytest

from parallelformers_ng.batching import batch_proof
from parallelformers_ng.batching.batch_proof import Trial
from parallelformers_ng.errors import DeadlineExpiredError


def test_a_call_waits_no_longer_than_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()

    def prove(*_: object) -> tuple[str, bool]:
        ends.wait(20)
        return "a reason", False

    monkeypatch.setattr(batch_proof, "prove", prove)
    trial = Trial(at_once=True)
    began = time.monotonic()
    with pytest.raises(DeadlineExpiredError, match="tested for batching"):
        trial.why_alone(dict, None, end=began + 0.2)
    assert time.monotonic() - began < 10
    ends.set()
    assert trial.why_alone(dict, None) == "a reason"
