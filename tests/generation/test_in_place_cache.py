"""Tests that caches that grow in place equal transformers' caches, after any operation between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers.cache_utils import DynamicLayer

from parallelformers_ng.generation.in_place_cache import MIN_SPARE_TOKENS, append_in_place, expect, spread
from tests.helpers.caches_in_place import caches_in_place

CONCATENATE = DynamicLayer.update


@pytest.fixture
def grow() -> Iterator[Callable[..., object]]:
    """Install the cache methods that work in place, and yield the update; restore the original methods afterwards."""
    with caches_in_place():
        append_in_place()
        assert DynamicLayer.update.__wrapped__ is CONCATENATE
        yield DynamicLayer.update


class Pair:
    """A cache layer that grows in place and a cache layer that concatenates, which get the same operations."""

    def __init__(self, grow: Callable[..., object]) -> None:
        self.layers = (DynamicLayer(), DynamicLayer())
        self.updates = (grow, CONCATENATE)

    def append(self, tokens: int, batch: int = 2) -> None:
        keys, values = torch.randn(batch, 3, tokens, 8), torch.randn(batch, 3, tokens, 5)
        for layer, update in zip(self.layers, self.updates, strict=True):
            states = update(layer, keys, values)
            assert states[0] is layer.keys
            assert states[1] is layer.values
        self.check()

    def check(self) -> None:
        grown, wanted = self.layers
        torch.testing.assert_close(grown.keys, wanted.keys, rtol=0, atol=0)
        torch.testing.assert_close(grown.values, wanted.values, rtol=0, atol=0)


@torch.inference_mode()
def test_in_place_cache_equals_concatenation(grow: Callable[..., object]) -> None:
    pair = Pair(grow)
    pair.append(7)
    for _ in range(3 * MIN_SPARE_TOKENS):
        pair.append(1)
    pair.append(5)
    for layer in pair.layers:
        layer.crop(-4)
    pair.append(2)
    for layer in pair.layers:
        layer.reorder_cache(torch.tensor([1, 1]))
    pair.append(1)
    for layer in pair.layers:
        layer.batch_repeat_interleave(2)
    pair.append(1, batch=4)
    for layer in pair.layers:
        layer.batch_select_indices(torch.tensor([2, 0]))
    pair.append(1)


@torch.inference_mode()
def test_expected_tokens_have_room(grow: Callable[..., object]) -> None:
    pair, places = Pair(grow), set()
    expect(pair.layers, 5 * MIN_SPARE_TOKENS)
    for _ in range(5):
        pair.append(MIN_SPARE_TOKENS)
        places.add(pair.layers[0].keys.data_ptr())
    assert len(places) == 1


@torch.inference_mode()
def test_a_step_writes_where_there_is_room(grow: Callable[..., object]) -> None:
    pair = Pair(grow)
    pair.append(7)
    places = set()
    for _ in range(MIN_SPARE_TOKENS):
        pair.append(1)
        places.add(pair.layers[0].keys.data_ptr())
    assert len(places) == 1
    pair.append(1)
    assert pair.layers[0].keys.data_ptr() not in places


@torch.inference_mode()
def test_a_cropped_layer_keeps_its_memory_alone(grow: Callable[..., object]) -> None:
    pair = Pair(grow)
    pair.append(7)
    pair.append(5)
    place = pair.layers[0].keys.data_ptr()
    for layer in pair.layers:
        layer.crop(-4)
    pair.append(3)
    assert pair.layers[0].keys.data_ptr() == place
    kept = pair.layers[0].keys[:, :, 2:]
    before = kept.clone()
    for layer in pair.layers:
        layer.crop(-4)
    pair.append(6)
    assert torch.equal(kept, before), "a later token has overwritten a tensor of other code"


@torch.inference_mode()
def test_tensors_of_others_are_not_overwritten(grow: Callable[..., object]) -> None:
    """A crop, a copy, a shallow copy and a layer with the same tensors each continue from the same tokens."""
    pair = Pair(grow)
    pair.append(7)
    pair.append(1)
    first, kept = pair.layers[0], pair.layers[0].keys
    before = kept.clone()
    deep, shallow, taken = copy.deepcopy(first), copy.copy(first), DynamicLayer()
    taken.keys, taken.values, taken.is_initialized = first.keys, first.values, True
    taken.device = first.device
    seen = []
    for layer in (first, deep, shallow, taken):
        keys, values = torch.randn(2, 3, 1, 8), torch.randn(2, 3, 1, 5)
        grow(layer, keys, values)
        seen.append((layer, torch.cat([before, keys], dim=-2)))
    for layer, wanted in seen:
        torch.testing.assert_close(layer.keys, wanted, rtol=0, atol=0)
    first.crop(-2)
    grow(first, torch.zeros(2, 3, 1, 8), torch.zeros(2, 3, 1, 5))
    torch.testing.assert_close(kept, before, rtol=0, atol=0)


def test_unfitting_tensors_are_concatenated(grow: Callable[..., object]) -> None:
    layer = DynamicLayer()
    with torch.inference_mode():
        grow(layer, torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        grow(layer, torch.ones(1, 2, 1, 4, dtype=torch.float64), torch.ones(1, 2, 1, 4, dtype=torch.float64))
        assert layer.keys.dtype is torch.float64
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            grow(layer, torch.ones(2, 2, 1, 4).double(), torch.ones(2, 2, 1, 4).double())
    keys = torch.ones(1, 2, 3, 4, requires_grad=True)
    learning = DynamicLayer()
    grow(learning, keys, keys)
    grow(learning, keys, keys)
    assert learning.keys.requires_grad


@torch.inference_mode()
def test_more_sequences_need_no_copy() -> None:
    """The cache gets sequences, tokens before the others, and then tokens behind them."""
    with caches_in_place():
        layer, states = DynamicLayer(), torch.randn(2, 3, 7, 8)
        layer.update(states, states)
        spread(layer, 3, 9)
        assert torch.equal(layer.keys[:2, :, 2:], states)
        assert not layer.keys[:2, :, :2].any()
        assert not layer.keys[2:].any()
        memory, place = layer.keys.data_ptr(), layer.keys.untyped_storage().data_ptr()
        spread(layer, 6, 9)
        new = torch.randn(6, 3, 1, 8)
        layer.update(new, new)
        assert layer.keys.data_ptr() == memory
        assert torch.equal(layer.keys[:, :, -1:], new)
        assert torch.equal(layer.values[:2, :, 2:9], states)
        assert not layer.values[3:, :, :9].any()
        spread(layer, 7, 12)
        assert torch.equal(layer.values[:2, :, 4:11], states)
        assert not layer.values[:, :, :2].any()
        assert layer.keys.untyped_storage().data_ptr() == place
        spread(layer, 17, 12)
        assert layer.keys.untyped_storage().data_ptr() != place, "the memory has room for 16 sequences"
        assert torch.equal(layer.values[:2, :, 4:11], states)
