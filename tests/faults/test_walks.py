"""Runs a few short random walks; `python -m benchmarks.walks` runs many long walks."""

from __future__ import annotations

import pytest

from parallelformers_ng import parallelize
from tests.helpers.walk_models import MODELS
from tests.helpers.walks import Walk


@pytest.mark.parametrize(("seed", "name"), enumerate(MODELS))
def test_a_walk(seed: int, name: str) -> None:
    walk = Walk(name, seed, lambda model: parallelize(model, 2, workers={"max_restarts": 1000}))
    try:
        walk.run(20)
    except BaseException as error:
        error.add_note("; ".join(walk.steps[-8:]))
        raise
