"""Tests the default decode steps of `generate` on pretended CUDA devices: see `tests/pretend_cuda`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from parallelformers_ng import parallelize
from parallelformers_ng.cuda_graphs.modes import CAPTURED_BY_DEFAULT, static_steps
from parallelformers_ng.runtime.group import WorkerGroup
from tests.pretend_cuda.caller import small
from tests.pretend_cuda.ledger import LAUNCHES
from tests.pretend_cuda.objects import Counts
from tests.zoo.build import largest_difference
from tests.zoo.case import text_inputs, token_ids
from tests.zoo.decoders import gpt2

HOW: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


@pytest.fixture
def ranks(request: pytest.FixtureRequest, pretended_groups: Callable[[int], WorkerGroup]) -> Iterator[WorkerGroup]:
    """Yield a group of one rank, or of `request.param` ranks, with its count of recordings and replays reset."""
    group = pretended_groups(getattr(request, "param", 1))
    group.call("graphs")
    yield group
    group.call("graphs")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Yield a function that returns the messages about captured steps so far, with their levels."""
    with caplog.at_level(logging.INFO, "parallelformers_ng"):
        yield lambda: [(each.levelname, each.message) for each in caplog.records if "CUDA graphs" in each.message]


def test_captured_steps_are_the_default_on_cuda() -> None:
    assert static_steps("auto", "cuda", 2) == (CAPTURED_BY_DEFAULT, "")
    assert static_steps("auto", "cpu", 2) == static_steps("eager", "cuda", 2) == (None, "")


WRONG = "a recorded step gives other logits than the step as it is"
REFUSED = "RuntimeError: CUDA error: operation not permitted when stream is capturing"
NO_ROOM = "CUDA out of memory. Tried to allocate 2.00 GiB."


@pytest.mark.parametrize(
    ("fault", "why", "ranks"),
    [("wrong", WRONG, 1), ("refused", REFUSED, 1), ("no room", NO_ROOM, 2)],
    ids=["wrong", "refused", "no room"],
    indirect=["ranks"],
)
def test_failing_captured_steps_are_given_up(fault: str, why: str, ranks: WorkerGroup, said: Any) -> None:
    """The call returns its answer with a warning, and later calls do not try to capture again."""
    whole = small()
    want = whole.generate(**text_inputs(), **HOW)
    with parallelize(small(), workers=ranks) as model:
        ranks.call("graphs", fault)
        for _ in range(2):
            assert torch.equal(model.generate(**text_inputs(), **HOW), want)
            assert said() == [("WARNING", f"generate runs without CUDA graphs: {why}")]
        assert ranks.call("graphs")[1] == (1 if fault == "wrong" else 0)
        assert ranks.call("static_caches") == 0


def test_answers_have_caches_that_grow(ranks: WorkerGroup, said: Any) -> None:
    """A cache that the caller gets can grow, as without captured steps."""
    whole, ids = small(), text_inputs()["input_ids"]
    options = {**HOW, "return_dict_in_generate": True}
    with parallelize(small(), workers=ranks) as model:
        first, want = model.generate(ids, **options), whole.generate(ids, **options)
        assert isinstance(first.past_key_values, DynamicCache)
        more = token_ids(length=130)  # more than a cache of fixed size could have held
        got = model(more, past_key_values=first.past_key_values).logits
        assert largest_difference(got, whole(more, past_key_values=want.past_key_values).logits) <= 1e-4
    assert ranks.call("graphs") == (0, 0)
    reason = "return_dict_in_generate would return a cache that cannot grow"
    assert said() == [("INFO", f"generate runs without CUDA graphs: {reason}")]


@pytest.mark.parametrize(
    "options", [{"do_sample": False}, pytest.param({"do_sample": True, "seed": 3}, marks=pytest.mark.slow)]
)
def test_next_step_launches_before_the_last_ends(options: dict[str, Any], pretended_one: WorkerGroup) -> None:
    with parallelize(small(), workers=pretended_one, decode="eager") as model:
        model.generate(**text_inputs(), **{**HOW, **options})
        step = pretended_one.call("last_step")
    assert step["ahead"] >= 0.9 * step[LAUNCHES] > 30


class Streamed(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_extra_step_leaves_no_trace(pretended_one: WorkerGroup) -> None:
    """The extra step adds no token to the answer or the stream, and uses no position beyond the model's table."""
    whole, ids = gpt2(), token_ids(rows=1, length=64 - 3)
    end = whole.generate(ids, max_new_tokens=4, do_sample=False)[0, -1].item()
    options: dict[str, Any] = {"max_new_tokens": 20, "min_new_tokens": 3, "do_sample": False, "eos_token_id": end}
    mine, theirs = Streamed(), Streamed()
    want = whole.generate(ids, **options, streamer=mine)
    assert want.shape == (1, 64 + 1)  # the last token is not looked up
    counts = [Counts(), Counts()]
    with parallelize(gpt2(), workers=pretended_one) as model:
        assert torch.equal(model.generate(ids, **options, streamer=theirs), want)
        assert theirs.tokens == mine.tokens
        assert pretended_one.call("last_step")["ahead"] > 0
        for each, counting in zip((whole, model), counts, strict=True):
            assert torch.equal(each.generate(ids, **options, logits_processor=[counting]), want)
        assert counts[0].calls == counts[1].calls == 4
        assert pretended_one.call("last_step")["ahead"] == 0
