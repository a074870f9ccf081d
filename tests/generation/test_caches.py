"""Tests caches of the caller: the keys and values stay in the workers, and the caller has handles of the caches'
classes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import EncoderDecoderCache

from parallelformers_ng import parallelize
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from tests.generation.test_generate import Pair, assert_same
from tests.zoo.build import largest_difference
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import decoder
from tests.zoo.seq2seq import t5


@pytest.fixture(scope="module")
def llama(groups) -> Iterator[Pair]:
    with parallelize(decoder("Llama"), workers=groups(2)) as parallel:
        yield Pair(decoder("Llama"), parallel, text_inputs())


def decode_by_hand(model: Any, cache: Any, steps: int = 5) -> list[int]:
    ids, tokens = torch.tensor([[5, 9, 77, 31]]), []
    for _ in range(steps):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        ids = out.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


@pytest.mark.parametrize("kind", ["none", "dynamic", "dynamic-config", "static"])
def test_a_decode_loop_by_hand(llama: Pair, kind: str) -> None:
    def cache() -> Any:
        config = llama.whole.config
        return {
            "none": lambda: None,
            "dynamic": lambda: DynamicCache(),
            "dynamic-config": lambda: DynamicCache(config=config),
            "static": lambda: StaticCache(config=config, max_cache_len=32),
        }[kind]()

    with torch.no_grad():
        want = decode_by_hand(llama.whole, cache())
    assert decode_by_hand(llama.parallel, cache()) == want


def test_a_users_cache_object_becomes_the_handle(llama: Pair) -> None:
    cache = DynamicCache()
    out = llama.parallel(input_ids=torch.tensor([[5, 9, 77]]), past_key_values=cache)
    assert out.past_key_values is cache
    assert isinstance(cache, DynamicCache)
    assert cache.get_seq_length() == 3
    assert len(cache) == 2


def play(model: Any) -> list[torch.Tensor]:
    """Return the logits with a cache after copying, cropping, reordering, repeating and selecting."""
    first = model(**text_inputs(), use_cache=True)
    cache = first.past_key_values
    other = copy.deepcopy(cache)
    other.crop(-2)
    other.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert (cache.get_seq_length(), other.get_seq_length()) == (7, 5)
    step = torch.tensor([[8], [9]])
    return [first.logits, *(model(input_ids=step, past_key_values=each).logits for each in (cache, other))]


def test_crop_copy_reorder_and_select(llama: Pair) -> None:
    with torch.no_grad():
        want = play(llama.whole)
    assert_same(play(llama.parallel), want)


def test_an_encoder_decoder_cache(groups) -> None:
    def play(model: Any) -> torch.Tensor:
        inputs = seq2seq_inputs()
        out = model(**inputs, use_cache=True)
        assert isinstance(out.past_key_values, EncoderDecoderCache)
        step = {**inputs, "decoder_input_ids": torch.tensor([[8], [9]])}
        return model(**step, past_key_values=out.past_key_values).logits

    with torch.no_grad():
        want = play(t5())
    with parallelize(t5(), workers=groups(2)) as model:
        assert largest_difference(play(model), want) <= 1e-4


def test_a_filled_cache_from_elsewhere_is_refused(llama: Pair) -> None:
    with torch.no_grad():
        cache = llama.whole(**llama.inputs).past_key_values
    with pytest.raises(ParallelError, match="filled outside"):
        llama.parallel(input_ids=torch.tensor([[1], [2]]), past_key_values=cache)


def test_dropped_handles_free_the_workers_memory(llama: Pair) -> None:
    for _ in range(50):
        llama.parallel(**llama.inputs)
    gc.collect()
    llama.parallel(**llama.inputs, use_cache=False)
    deployment = deployment_of(llama.parallel)
    group, _, _ = deployment.replicas[0].ready()
    assert group.call("caches.held") <= 1


def test_the_halves_of_an_encoder_decoder_cache(groups) -> None:
    def play(model: Any) -> list[Any]:
        inputs, step = seq2seq_inputs(), torch.tensor([[8], [9]])
        out = model(**inputs, use_cache=True)
        whole = out.past_key_values
        own, cross = whole.self_attention_cache, whole.cross_attention_cache
        seen = [own.get_seq_length(), cross.get_seq_length(), len(own), isinstance(cross, DynamicCache), own.batch_size]
        model(**{**inputs, "decoder_input_ids": step}, past_key_values=whole)
        seen += [own.get_seq_length(), cross.get_seq_length(), own.get_mask_sizes(1, 0)]
        own.crop(-1)
        seen += [own.get_seq_length(), whole.get_seq_length(), cross.get_seq_length()]
        whole.reorder_cache(torch.tensor([1, 0]))
        other = copy.deepcopy(own)
        own.crop(-1)
        seen += [other.get_seq_length(), own.get_seq_length(), cross.batch_size]
        kept = whole.self_attention_cache
        del whole, own, out
        gc.collect()
        seen.append(kept.get_seq_length())
        return seen

    with torch.no_grad():
        want = play(t5())
    with parallelize(t5(), workers=groups(2)) as model:
        assert play(model) == want
        gc.collect()
        model(**seq2seq_inputs(), use_cache=False)
        deployment = deployment_of(model)
        assert deployment.replicas[0].ready()[0].call("caches.held") == 0


def test_decoder_half_of_a_cache_can_be_passed(groups) -> None:
    def play(model: Any) -> list[torch.Tensor]:
        whole = model(**seq2seq_inputs(), use_cache=True).past_key_values
        half, step = whole.self_attention_cache, torch.tensor([[8], [9]])
        out = model.get_decoder()(step, past_key_values=half, use_cache=True)
        assert out.past_key_values == half
        assert half == whole.self_attention_cache
        return [out.last_hidden_state, torch.tensor([half.get_seq_length(), whole.get_seq_length()])]

    with torch.no_grad():
        want = play(t5())
    with parallelize(t5(), workers=groups(2)) as model:
        assert_same(play(model), want)


class Counting(DynamicCache):
    """Counts its updates, and has tensors of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.updates, self.step, self.kept = 0, 1, None

    def update(self, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.updates += self.step
        self.kept = keys
        return super().update(keys, *args, **kwargs)


def test_attributes_of_a_users_cache_class(llama: Pair) -> None:
    counts = []
    for model in (llama.whole, llama.parallel):
        cache = Counting()
        decode_by_hand(model, cache)
        counts.append(cache.updates)
        cache.step = 10
        decode_by_hand(model, cache)
        counts.append(cache.updates)
        assert not hasattr(cache, "other")
    assert counts[:2] == counts[2:]
    with pytest.raises(ParallelError, match="kept of this Counting has tensors"):
        _ = cache.kept
