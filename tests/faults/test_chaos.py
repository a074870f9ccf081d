"""Tests calls of many threads while workers are killed: every caller gets the right answer or a typed error."""

from __future__ import annotations

from benchmarks.chaos_storm import PHASES, storm
from tests.helpers.patience import PROMPTLY


def test_a_short_storm(groups):
    report = storm(requests=50, threads=4, kills=len(PHASES), seed=1, calm=groups(2))
    assert report.hung == 0
    assert set(report.outcomes) <= {"right", "WorkerDiedError"}, report.outcomes
    assert report.outcomes["right"] >= 15
    assert sum(report.outcomes.values()) >= 50
    assert set(report.killed_in) == set(PHASES)
    assert max(report.latencies) <= PROMPTLY
