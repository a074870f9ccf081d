"""Tests that a sequence is copied for later prompts only if the copy saves time."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

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
