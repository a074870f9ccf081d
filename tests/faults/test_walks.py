"""Runs a few short random walks; `python -m benchmarks.walks` runs many long walks."""

from __future__ import annotations

import pytest

from parallelformers_ng import parallelize
from tests.helpers.walks import MODELS, Walk


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_a_walk(seed: int) -> None:
    make, inputs = list(MODELS.values())[seed]
    walk = Walk(make, inputs(), seed, lambda model: parallelize(model, 2, workers={"max_restarts": 1000}))
    try:
        walk.run(20)
    except BaseException as error:
        error.add_note("; ".join(walk.steps[-8:]))
        raise
