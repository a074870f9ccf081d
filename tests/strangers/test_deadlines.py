"""Tests that a call after its deadline raises the right error, sends nothing and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from parallelformers_ng import deadline, parallelize
from parallelformers_ng.errors import DeadlineExpiredError
from parallelformers_ng.model.parallelized import deployment_of
from tests.helpers.paused_group import paused
from tests.strangers.agreement import NEW_TOKENS, assert_agree, prompt
from tests.zoo.decoders import decoder

CALLS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model(prompt()),
    "generate": lambda model: model.generate(prompt(), **NEW_TOKENS),
    "memory": lambda model: model.memory_allocated(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("batching", [True, False])
def test_an_expired_call_is_not_sent(groups, name: str, batching: bool) -> None:
    group = groups(2)
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=group, batching=batching)
    cut.generate(prompt(), **NEW_TOKENS)
    pids = deployment_of(cut).pids
    for _ in range(5):
        with deadline(1e-3):
            time.sleep(0.01)
            with pytest.raises(DeadlineExpiredError):
                CALLS[name](cut)
    assert group.alive
    assert deployment_of(cut).pids == pids
    assert_agree(cut, whole, prompt())
    cut.deparallelize()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "crop": lambda cache: cache.crop(5),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_cache_change_past_the_deadline_has_no_effect(groups, name: str) -> None:
    change = CHANGES[name]
    group = groups(2)
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=group, batching=False)
    ids, last = prompt(10).repeat(2, 1), prompt(2, seed=3).reshape(2, 1)
    ids[1] = prompt(10, seed=2)
    with torch.no_grad():
        plain = whole(ids, use_cache=True, past_key_values=DynamicCache()).past_key_values
    cache = cut(ids, use_cache=True).past_key_values
    with paused(group), deadline(0.2), pytest.raises(DeadlineExpiredError):
        change(cache)
    with torch.no_grad():
        want = whole(last, past_key_values=plain).logits
    assert torch.allclose(cut(last, past_key_values=cache).logits, want, atol=1e-4)
    cut.deparallelize()
