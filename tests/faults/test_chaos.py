"""A short storm: workers are killed while threads ask, and every caller gets the right answer or a typed error."""

from __future__ import annotations

from benchmarks.chaos_storm import PHASES, storm
from tests.helpers.patience import PROMPTLY


def test_a_short_storm(groups):
    found = storm(requests=50, threads=4, kills=len(PHASES), seed=1, calm=groups(2))
    assert found.hung == 0
    assert set(found.outcomes) <= {"right", "WorkerDiedError"}, found.outcomes
    assert found.outcomes["right"] >= 15
    assert sum(found.outcomes.values()) >= 50
    assert set(found.killed_in) == set(PHASES)
    assert max(found.latencies) <= PROMPTLY
