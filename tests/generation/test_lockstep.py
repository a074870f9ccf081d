"""Tests that ranks make the same steps although their clocks, their choices and the order of their sets differ."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel, StoppingCriteria

from parallelformers_ng import parallelize
from parallelformers_ng.errors import DivergedError
from parallelformers_ng.model.parallelized import deployment_of
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2

PROMPT = text_inputs()["input_ids"]


@pytest.fixture
def model(groups) -> Any:
    model = parallelize(gpt2(), workers=groups(2))
    yield model
    model.deparallelize()


class EarlyOnOneRank(StoppingCriteria):
    """A criterion that ends all sequences after three tokens on one rank alone, as a clock could."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = os.getpid() == self.pid and input_ids.shape[1] >= PROMPT.shape[1] + 3
        return torch.full((input_ids.shape[0],), ends)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(("rank", "length"), [(0, 3), (1, 8)])
def test_sequences_end_where_rank_0_ends_them(model, rank, length, beams):
    criterion = EarlyOnOneRank(deployment_of(model).pids[rank])
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "timeout": 20}
    tokens = model.generate(PROMPT, stopping_criteria=[criterion], **options)
    assert tokens.shape == (len(PROMPT), PROMPT.shape[1] + length)
    assert torch.equal(tokens, model.generate(PROMPT, **{**options, "max_new_tokens": length}))


class Answering(GPT2LMHeadModel):
    """A model with an additional method that generates."""

    def answer(self, criterion: StoppingCriteria) -> torch.Tensor:
        return self.generate(PROMPT, max_new_tokens=8, do_sample=False, stopping_criteria=[criterion])


@pytest.mark.parametrize(("rank", "length"), [(0, 3), (1, 8)])
def test_generating_method_ends_where_rank_zero_ends(groups, rank, length):
    model = gpt2()
    model.__class__ = Answering
    with parallelize(model, workers=groups(2)):
        tokens = model.answer(EarlyOnOneRank(deployment_of(model).pids[rank]))
    assert tokens.shape == (len(PROMPT), PROMPT.shape[1] + length)


class Deciding(GPT2LMHeadModel):
    """A model whose forward generates if it gets a criterion."""

    def forward(self, *args: Any, criterion: StoppingCriteria | None = None, **kwargs: Any) -> Any:
        if criterion is not None:
            return self.generate(PROMPT, max_new_tokens=8, do_sample=False, stopping_criteria=[criterion])
        return super().forward(*args, **kwargs)


def test_forward_that_generates_ends_where_rank_zero_ends(groups):
    model = gpt2()
    model.__class__ = Deciding
    with parallelize(model, workers=groups(2)):
        for rank, length in ((0, 3), (1, 8)):
            tokens = model(criterion=EarlyOnOneRank(deployment_of(model).pids[rank]))
            assert tokens.shape == (len(PROMPT), PROMPT.shape[1] + length)


def test_time_limit_ends_ranks_at_the_same_token(model):
    for hundredths in range(1, 9):
        tokens = model.generate(PROMPT, max_new_tokens=50, do_sample=False, max_time=hundredths / 100, timeout=20)
        assert PROMPT.shape[1] < tokens.shape[1] <= PROMPT.shape[1] + 50


def _prefers_own_token(pid: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if os.getpid() == pid and input_ids.shape[1] == PROMPT.shape[1] + 2:
            scores[:, 7] = 1e9
        return scores

    return process


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_with_different_tokens_raise(model, rank):
    want = model.generate(PROMPT, max_new_tokens=6, do_sample=False)
    processor = _prefers_own_token(deployment_of(model).pids[rank])
    with pytest.raises(DivergedError, match=f"different tokens at length {PROMPT.shape[1] + 3}"):
        model.generate(PROMPT, max_new_tokens=6, do_sample=False, logits_processor=[processor], timeout=20)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=6, do_sample=False), want)


def test_sets_have_equal_order_on_all_ranks(model):
    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        first = next(iter({"some", "words", "in", "no", "order", "whatever"}))
        scores[:, 3 + len(first) * 7 + ord(first[0]) % 7] = 1e9
        return scores

    model.generate(PROMPT, max_new_tokens=2, do_sample=False, logits_processor=[process], timeout=20)
