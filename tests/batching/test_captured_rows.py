"""Tests the static cache of recorded steps; between steps, the batch's cache is a view of the static cache."""

from __future__ import annotations

import torch
from transformers import DynamicCache, GPT2Config, StaticCache

from parallelformers_ng.batching import row_caches as caches
from parallelformers_ng.cuda_graphs.static_caches import ReusableCache

CONFIG = GPT2Config(n_layer=2, n_embd=8, n_head=2)


def test_row_joining_between_steps_is_kept() -> None:
    batch, static = _cache(rows=3, tokens=5), ReusableCache(StaticCache(CONFIG, max_cache_len=16), 16)
    static.take(batch, 5)
    static.lend(batch, 5)
    joins = _cache(rows=1, tokens=4)
    caches.put_rows(batch, joins, [1], 3, 5)
    static.take(batch, 5)
    for kept, lent, joined in zip(static.layers, batch.layers, joins.layers, strict=True):
        assert torch.equal(kept.keys[1:2, :, 1:5], joined.keys)
        assert torch.equal(lent.values[1:2, :, 1:], joined.values)


def _cache(rows: int, tokens: int) -> DynamicCache:
    cache = DynamicCache(config=CONFIG)
    for layer in range(CONFIG.num_hidden_layers):
        cache.update(*torch.randn(2, rows, 2, tokens, 4), layer)
    return cache
