"""Tests masks that differ from head to head, and prompts of one token for layers that keep their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from tests.zoo.build import build, largest_difference

SIZES = {"vocab_size": 61, "num_hidden_layers": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, hidden_size=48, intermediate_size=64, num_attention_heads=6, num_key_value_heads=3),
    "gpt2": GPT2Config(**SIZES, hidden_size=60, num_attention_heads=5),
}


def _cut(model: Any, rank: Any) -> Any:
    return cut(model, build_plan(model, rank.world_size, select(model)), rank.rank, rank)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_mask_of_each_head(name: str, attention: str, world_size: int) -> None:
    config = CONFIGS[name]
    model = build(LlamaForCausalLM if name == "llama" else GPT2LMHeadModel, config, attention=attention)
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (2, 5), generator=numbers)
    mask = torch.randn(2, config.num_attention_heads, 5, 5, generator=numbers)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        for got in run_ranks(world_size, lambda rank: _cut(model, rank)(ids, attention_mask=mask).logits):
            assert largest_difference(got, wanted) < 1e-4


@pytest.mark.parametrize("world_size", [2, 3])
def test_recurrent_layers_begin_with_one_token(world_size: int) -> None:
    sizes = {"hidden_size": 48, "lru_width": 48, "num_attention_heads": 4, "num_key_value_heads": 1}
    config = RecurrentGemmaConfig(
        vocab_size=61, intermediate_size=96, num_hidden_layers=3, attention_window_size=8, eos_token_id=None, **sizes
    )
    model = build(RecurrentGemmaForCausalLM, config)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    for prompt in (torch.tensor([[7]]), torch.tensor([[7], [9]])):
        wanted = model.generate(prompt, **settings)
        for got in run_ranks(world_size, lambda rank, ids=prompt: _cut(model, rank).generate(ids, **settings)):
            assert torch.equal(got, wanted)
