"""Compares sharded models with transformers, without worker processes: the ranks are threads."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import PolicyError
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.partition import cut_interleaved, cut_width, group_runs, share_heads
from tests.zoo.build import largest_difference
from tests.zoo.decoders import bloom
from tests.zoo.families import ALL, NEWER, Case

NARROW = ("_a_proj", "indexer", "adapter_list", "per_layer", "altup", "laurel")
"""Layers of attention latents, and others with a width far below the hidden state's."""


# On two ranks these run as processes, in test_parity.py; on three ranks only generating models run, see below.
SHAPES = {"gpt2", "bert", "t5", "t5-gated-untied", "vit", "llama", "llama-tied-biased", "mistral", "qwen3", "mixtral"}
RUNS = [
    pytest.param(case, size, marks=[pytest.mark.slow] * (size == (5 if case.generates else 4)))
    for case in ALL
    for size in (1, 2, 3, 4, 5, 8)
    if case.name in SHAPES or size == 5 or (size == 2 and case in NEWER) or (size == 4 and not case.generates)
]


@pytest.mark.parametrize(("case", "world_size"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_every_rank_equals_the_whole_model(case: Case, world_size: int) -> None:
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


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("case", [case for case in ALL if case.generates], ids=lambda case: case.name)
def test_every_rank_generates_the_same_tokens(case: Case, world_size: int) -> None:
    if case.at_odds:
        pytest.skip(case.at_odds)
    model = case.make()
    inputs = {name: value for name, value in case.inputs().items() if not name.startswith("decoder_")}
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    want = model.generate(**inputs, **options)
    plan = build_plan(model, world_size, select(model))

    def run(communicator):
        return cut(model, plan, communicator.rank, communicator).generate(**inputs, **options)

    for got in run_ranks(world_size, run):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_everything_large_is_cut(case: Case) -> None:
    """Position embeddings and narrow layers are exceptions, because they are unusually large in such small models.

    A layer outside of blocks, such as a pooler, stays whole if that costs a rank at most 2 % of its memory.
    """
    model = case.make()
    plan = build_plan(model, 2, select(model))
    tables = ("position", "wpe", "rel_embeddings", *NARROW)
    tensors = [t for t in plan.stored() if t.name in plan.cuttable and not any(word in t.name for word in tables)]
    cut_bytes = sum(tensor.bytes_whole for tensor in tensors if not tensor.is_replicated)
    assert cut_bytes >= 0.93 * sum(tensor.bytes_whole for tensor in tensors), plan.replicated


def test_setting_that_a_policy_cannot_handle_is_refused() -> None:
    model = bloom(slow_but_exact=True)
    with pytest.raises(PolicyError, match=r"BloomPolicy: .*slow_but_exact is True"):
        build_plan(model, 2, select(model))


def test_interleaved_groups_are_cut_by_query_heads() -> None:
    """The layer has two groups of q q k v with heads two columns wide; three ranks get 2, 1 and 1 query heads."""
    ranges = cut_interleaved(16, ("query", "key", "key"), share_heads(4, 2, 3))
    assert ranges == [((0, 8),), ((8, 10), (12, 16)), ((10, 16),)]


def test_replicated_columns_are_counted_once() -> None:
    runs = group_runs([[(0, 4)], [(2, 6), (2, 4)], [(0, 4)]], 8)
    assert runs == [((0, 4, 0, True),), ((0, 2, 0, False), (2, 4, 0, True), (4, 6, 0, False)), ((0, 4, 0, False),)]


def test_parts_with_different_head_widths_are_cut() -> None:
    """The layer has four query heads of width three, two key heads of width two, and one column per query head."""
    ranges = cut_width(20, ("query", "key", "query"), share_heads(4, 2, 2), 2, (3, 2, 1))
    assert ranges == [((0, 6), (12, 14), (16, 18)), ((6, 12), (14, 16), (18, 20))]
    with pytest.raises(PolicyError, match="12 \\+ 4 \\+ 4 wide, not 21"):
        cut_width(21, ("query", "key", "query"), share_heads(4, 2, 2), 2, (3, 2, 1))


def test_interleaved_parts_with_different_widths_are_cut() -> None:
    """The layer has two groups of k k and q q, of widths three and one, on two ranks."""
    ranges = cut_interleaved(10, ("key", "query"), share_heads(4, 2, 2), (3, 1))
    assert ranges == [((0, 5),), ((5, 10),)]


def test_runs_of_columns_lie_in_one_group_each() -> None:
    assert group_runs([[(2, 6), (0, 2)]], 4) == [((0, 2, 0, True), (2, 4, 1, True), (4, 6, 0, True))]
