"""Tests that a cache used in a failed request is unchanged, or raises an error at its next use on all ranks."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from parallelformers_ng import parallelize
from parallelformers_ng.errors import StaleCacheError
from tests.faults.test_faults import OnToken, RaiseOnce
from tests.zoo.case import text_inputs
from tests.zoo.decoders import gpt2


def _interrupt(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    model.generate(ids[:1], past_key_values=cache, max_new_tokens=50, do_sample=False, streamer=OnToken(stop))


@pytest.mark.parametrize("end", ["an error in one block of one rank", "an interrupt"])
def test_cache_written_by_a_failed_request_is_refused(groups, end):
    """After the failed request, the cache on rank 1 has one token more in its first layer than in its second layer. On
    rank 0 both layers have the token."""
    model, ids, group = gpt2(), text_inputs()["input_ids"][:1], groups(2)
    model.transformer.h[1].register_forward_pre_hook(RaiseOnce(spared=1 if "error" in end else 1000))
    parallelize(model, workers=group)
    cache = model(ids[:, :-1]).past_key_values
    with pytest.raises((ZeroDivisionError, KeyboardInterrupt)):
        _interrupt(model, ids, cache) if end == "an interrupt" else model(ids[:, -1:], past_key_values=cache)
    for use in (
        lambda: model(ids[:, -1:], past_key_values=cache),
        lambda: cache.get_seq_length(),
        lambda: cache.crop(1),
        lambda: copy.deepcopy(cache),
    ):
        with pytest.raises(StaleCacheError, match="run the prompt again"):
            use()
    del cache, use
    gc.collect()
    cache = model(ids[:, :-1]).past_key_values
    assert cache.get_seq_length() == ids.shape[1] - 1
    assert group.call_each("caches.held", [()] * 2) == [1, 1]
    model.deparallelize()


def test_untouched_cache_survives_a_failed_request(groups):
    model, ids, group = gpt2(), text_inputs()["input_ids"][:1], groups(2)
    with torch.no_grad():
        wanted = model(ids).logits[:, -1]
    parallelize(model, workers=group)
    cache = model(ids[:, :-1]).past_key_values
    with pytest.raises(IndexError):
        model(ids[:, -1:] + 1000, past_key_values=cache)
    assert torch.allclose(model(ids[:, -1:], past_key_values=cache).logits[:, -1], wanted, atol=1e-5)
    with pytest.raises(TypeError):
        cache.crop("all")
    with pytest.raises(StaleCacheError):
        cache.get_seq_length()
    model.deparallelize()


def test_callers_cache_can_be_filled_after_failure(groups):
    model, ids, group = gpt2(), text_inputs()["input_ids"][:1], groups(2)
    model.transformer.h[1].register_forward_pre_hook(RaiseOnce())
    parallelize(model, workers=group)
    cache = DynamicCache()
    with pytest.raises(ZeroDivisionError):
        model(ids, past_key_values=cache)
    model(ids, past_key_values=cache)
    assert cache.get_seq_length() == ids.shape[1]
    assert group.call_each("caches.held", [()] * 2) == [1, 1]
    model.deparallelize()
