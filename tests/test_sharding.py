"""Cutting is proven without processes: the ranks are threads and the reference is transformers itself."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.registry import select
from tests.zoo.build import largest_difference
from tests.zoo.families import CASES, Case


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_gives_what_the_whole_model_gives(case: Case, world_size: int) -> None:
    model = case.make()
    inputs = case.inputs()
    with torch.no_grad():
        want = model(**inputs)[0]
    plan = build_plan(model, world_size, select(model))

    def run(communicator):
        share = cut(model, plan, communicator.rank, communicator)
        with torch.no_grad():
            return share(**inputs)[0]

    results = run_ranks(world_size, run)
    for got in results:
        assert torch.equal(got, results[0]), "ranks must agree bit for bit"
    assert largest_difference(results[0], want) <= 1e-4


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", [case for case in CASES if case.generates], ids=lambda case: case.name)
def test_every_rank_generates_what_the_whole_model_generates(case: Case, world_size: int) -> None:
    model = case.make()
    inputs = {name: value for name, value in case.inputs().items() if not name.startswith("decoder_")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = model.generate(**inputs, **options)
    plan = build_plan(model, world_size, select(model))

    def run(communicator):
        return cut(model, plan, communicator.rank, communicator).generate(**inputs, **options)

    for got in run_ranks(world_size, run):
        assert torch.equal(got, want)
