"""Cutting is proven without processes: the ranks are threads and the reference is transformers itself."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.partition import count_once, cut_interleaved, share_heads
from parallelformers_ng.sharding.registry import select
from tests.zoo.build import largest_difference
from tests.zoo.decoders import bloom
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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_everything_large_is_cut(case: Case) -> None:
    """Tables of positions aside: on models this small they weigh more than they ever do."""
    model = case.make()
    plan = build_plan(model, 2, select(model))
    tables = ("position", "wpe", "rel_embeddings")
    tensors = [t for t in plan.stored() if t.name in plan.cuttable and not any(word in t.name for word in tables)]
    cut_bytes = sum(tensor.bytes_whole for tensor in tensors if not tensor.is_replicated)
    assert cut_bytes >= 0.95 * sum(tensor.bytes_whole for tensor in tensors), plan.replicated


def test_a_setting_for_which_a_policy_is_wrong_is_refused() -> None:
    model = bloom(slow_but_exact=True)
    with pytest.raises(PolicyError, match=r"BloomPolicy: .*slow_but_exact is True"):
        build_plan(model, 2, select(model))


def test_interleaved_groups_are_cut_by_query_heads() -> None:
    """Two groups of q q k v, a head two columns wide, on three ranks: 2, 1 and 1 query heads."""
    ranges = cut_interleaved(16, ("query", "key", "key"), share_heads(4, 2, 3))
    assert ranges == [((0, 8),), ((8, 10), (12, 16)), ((10, 16),)]


def test_a_column_that_several_ranks_hold_is_counted_once() -> None:
    assert count_once([[(0, 4)], [(2, 6), (2, 4)], [(0, 4)]]) == [((0, 4),), ((2, 4),), ()]
