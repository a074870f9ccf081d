"""Tests the memory that all layers of a small cache share, against caches that concatenate."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from parallelformers_ng.generation import in_place_cache
from parallelformers_ng.generation.in_place_cache import (
    MIN_SPARE_TOKENS,
    expect,
    extended_jointly,
    joint_room,
)
from tests.helpers.caches_in_place import caches_in_place

LAYERS, HEADS, WIDTH = 3, 2, 4


@pytest.fixture(autouse=True)
def in_place() -> Iterator[None]:
    """Install the cache methods that work in place, in inference mode; restore the original methods afterwards."""
    with caches_in_place(), torch.inference_mode():
        yield


class Pair:
    """A cache with a joint room, and the tensors that it must contain."""

    def __init__(self, sequences: int = 1) -> None:
        self.cache = DynamicCache()
        self.cache.layers = [DynamicLayer() for _ in range(LAYERS)]
        self.want = [torch.empty(sequences, HEADS, 0, WIDTH) for _ in range(2 * LAYERS)]

    def append(self, tokens: int) -> bytes | None:
        new = [torch.randn(*want.shape[:2], tokens, WIDTH) for want in self.want]
        addresses = extended_jointly(self.cache, self.cache.layers, tokens, new[0])
        if addresses is not None:
            self.want = [torch.cat(pair, dim=2) for pair in zip(self.want, new, strict=True)]
            for states, values in zip(self.states, new, strict=True):
                states[:, :, states.shape[2] - tokens :] = values
            self.check()
        return addresses

    def crop(self, tokens: int) -> None:
        self.cache.crop(-tokens)
        self.want = [want[:, :, : want.shape[2] - tokens] for want in self.want]
        self.check()

    @property
    def states(self) -> list[torch.Tensor]:
        return [states for layer in self.cache.layers for states in (layer.keys, layer.values)]

    def check(self) -> None:
        for states, want in zip(self.states, self.want, strict=True):
            assert torch.equal(states, want)


def test_joint_room_grows_and_crops() -> None:
    pair = Pair()
    addresses = {pair.append(tokens) for tokens in (5, 1, 1)}
    assert len(addresses) == 1, "a step with room copies nothing"
    pair.crop(2)
    pair.crop(0)
    assert pair.append(3) in addresses
    assert pair.append(MIN_SPARE_TOKENS) not in addresses
    pair.append(1)
    assert pair.cache.get_seq_length() == 9 + MIN_SPARE_TOKENS


def test_expected_tokens_need_no_larger_room() -> None:
    pair = Pair()
    expect(pair.cache.layers, 5 * MIN_SPARE_TOKENS)
    addresses = {pair.append(MIN_SPARE_TOKENS) for _ in range(5)}
    assert len(addresses) == 1
    assert pair.append(3 * MIN_SPARE_TOKENS) not in addresses


def test_addresses_are_those_of_the_layers() -> None:
    pair = Pair()
    addresses = pair.append(7)
    assert addresses is not None
    numbers = torch.frombuffer(bytearray(addresses), dtype=torch.int64).view(LAYERS, 8).tolist()
    for layer, (keys, values, *strides) in zip(pair.cache.layers, numbers, strict=True):
        assert (keys, values) == (layer.keys.data_ptr(), layer.values.data_ptr())
        assert strides == [*layer.keys.stride()[:3], *layer.values.stride()[:3]]


def test_tensors_that_others_hold_keep_their_values() -> None:
    pair = Pair()
    pair.append(6)
    kept = pair.cache.layers[1].keys
    before = kept.clone()
    pair.crop(3)
    pair.append(3)
    assert torch.equal(kept, before)
    assert not torch.equal(pair.cache.layers[1].keys, before)


@pytest.mark.parametrize("change", ["reorder", "update", "copy"])
def test_changed_layers_get_new_memory(change: str) -> None:
    pair = Pair()
    before = pair.append(4)
    if change == "reorder":
        pair.cache.reorder_cache(torch.tensor([0]))
    elif change == "update":
        new = torch.randn(1, HEADS, 2, WIDTH)
        for number in range(LAYERS):
            pair.cache.update(new, new, number)
        pair.want = [torch.cat((want, new), dim=2) for want in pair.want]
    else:
        original, pair.cache = pair.cache, copy.deepcopy(pair.cache)
    assert joint_room(pair.cache, pair.cache.layers) is None
    assert pair.append(1) != before
    if change == "copy":
        assert original.get_seq_length() == 4


def test_large_caches_and_batches_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pair(sequences=2).append(1) is None
    of_token = 2 * LAYERS * HEADS * WIDTH * 4
    monkeypatch.setattr(in_place_cache, "MAX_JOINT_BYTES", 9 * of_token)
    pair = Pair()
    assert pair.append(9) is not None
    pair.crop(9)
    assert pair.append(10) is None
    assert not pair.cache.layers[0].keys.numel()
