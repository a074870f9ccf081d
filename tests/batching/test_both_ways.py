"""Tests that calls of a model whose tokens see later tokens get the same tokens together as alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup


def _config(model: Any) -> None:
    model.config.is_causal = False


def _attribute(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


@pytest.mark.parametrize("change", [_config, _attribute])
def test_prompts_together(change: Callable[[Any], None], groups: Callable[[int], WorkerGroup]) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=99, **sizes, initializer_range=0.5, eos_token_id=None, pad_token_id=0)
    model = LlamaForCausalLM(config).eval()
    numbers = torch.Generator().manual_seed(0)
    first = torch.randint(3, 98, (1, 30), generator=numbers)
    ends = [torch.randint(3, 98, (1, 2 + number), generator=numbers) for number in range(4)]
    prompts = [*(first[:, : 5 + 4 * number] for number in range(4)), *(torch.cat([first, end], 1) for end in ends)]
    settings = {"max_new_tokens": 5, "do_sample": False}
    change(model)
    wanted = [model.generate(prompt, **settings) for prompt in prompts]
    if change is _config:
        model.config.is_causal = True
    parallelize(model, workers=groups(2), batching=True)
    try:
        if change is _config:  # after the proof
            model.generate(prompts[0], **settings)
            change(model)
        with ThreadPoolExecutor(len(prompts)) as threads:
            for _ in range(2):
                got = [*threads.map(lambda prompt: model.generate(prompt, **settings), prompts)]
                assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    finally:
        model.deparallelize()
