"""Tests when a sequence is copied for later prompts, and that the copy is independent of the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from parallelformers_ng.batching.prefix_cache import PrefixCache

IDS = torch.randint(5, 95, (1, 400), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("tokens", "copies", "kept"),
    [
        (257, True, 256),
        (264, True, 256),  # 7 tokens run in the time in which 224 are copied
        (265, True, 265),  # 8 tokens, 256
        (258, False, 258),
        (257, False, 256),
    ],
)
def test_sequence_is_kept_if_that_saves_time(tokens: int, copies: bool, kept: int) -> None:
    prefixes = PrefixCache(2000)
    for length in (256, tokens):
        cache = DynamicCache([(torch.zeros(1, 2, length, 4),) * 2] * 2)
        prefixes.keep(IDS[:, :length], cache, 0, copies or length == 256)
    assert prefixes.length(IDS) == kept


@pytest.mark.parametrize("copies", [True, False])
def test_copy_survives_changes_of_the_batch(copies: bool) -> None:
    """Without a copy, the kept sequence shares the memory of the cache."""
    prefixes, cache = PrefixCache(2000), DynamicCache([(torch.ones(1, 2, 40, 4),) * 2] * 2)
    filled = DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    prefixes.keep(IDS[:, :40], cache, 0, copies)
    for layer in cache.layers:
        layer.keys.zero_()
        layer.values.zero_()
    prefixes.fill(filled, [IDS], 30)
    sums = [int(part.sum()) for layer in filled.layers for part in (layer.keys, layer.values)]
    assert sums == [2 * 30 * 4 if copies else 0] * 4
