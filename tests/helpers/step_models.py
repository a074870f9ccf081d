"""Small models with and without the kernels of a decode step, and what they are asked to do."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from parallelformers_ng.kernels import decoder_layer, decoder_stack
from parallelformers_ng.kernels.installation import install

LAYERS, VOCABULARY = 3, 97
TINY = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 8}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with every bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama with odd sizes": (LlamaConfig, LlamaForCausalLM, {"head_dim": 10, "intermediate_size": 131}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each half of a layer, and all layers at once, are computed in C from now on."""
    seen: Counter[str] = Counter()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            seen[name] += 1
            return getattr(kernel, name)

    kernel = decoder_layer._decode
    install(LlamaForCausalLM(LlamaConfig(**TINY)))  # the first time, the kernels are compared with transformers
    for module in (decoder_layer, decoder_stack):
        monkeypatch.setattr(module, "_decode", Counting())
    return seen


def models(family: str, dtype: torch.dtype = torch.float32, as_one: bool = False, **settings: Any) -> tuple[Any, Any]:
    """A model with random parameters, norms and biases too, and its copy with the kernels.

    Args:
        as_one: whether the copy's layers may be computed all at once.
    """
    config, model, special = FAMILIES.get(family, (MixtralConfig, MixtralForCausalLM, {}))
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2}
    lengths = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    stock = model(config(**sizes | lengths | special | settings)).to(dtype)
    for parameter in stock.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    stock.eval()
    fused = copy.deepcopy(stock)
    install(fused)
    if not as_one:
        fused.model.layers.__class__ = nn.ModuleList
    return stock, fused


def prompt(rows: int, tokens: int = 7) -> dict[str, Tensor]:
    """Some sequences, all but the first with padding before them."""
    numbers = torch.Generator().manual_seed(rows)
    seen = torch.ones(rows, tokens, dtype=torch.long)
    seen[1:, : tokens // 2] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, tokens), generator=numbers), "attention_mask": seen}


def generate(model: Any, tokens: int = 12, rows: int = 3, **how: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the scores that led to them."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": tokens} | how
    torch.manual_seed(1)
    with torch.inference_mode():
        made = model.generate(**prompt(rows), output_logits=True, return_dict_in_generate=True, **settings)
    return made.sequences, torch.stack(made.logits)


def distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


def cached_step(model: Any, cache: Any = None, **how: Any) -> Any:
    """The output for one token behind a prompt."""
    with torch.inference_mode():
        cache = cache or DynamicCache(config=model.config)
        model(**prompt(1), past_key_values=cache)
        return model(torch.tensor([[5]]), past_key_values=cache, **how)


def step(model: Any, **how: Any) -> Tensor:
    """Scores of one token behind a prompt."""
    scores: Tensor = cached_step(model, **how).logits
    return scores


def check_generations(family: str, as_one: bool, calls: Counter[str], each_step: dict[str, int]) -> None:
    """Generate in several ways with the kernels and without: the same tokens, the same scores, and so many calls of C
    for each token after the first."""
    stock, fused = models(family, as_one=as_one)
    for how in ({}, {"num_beams": 3}, {"do_sample": True}, {"tokens": 150, "rows": 1}):
        calls.clear()
        tokens, scores = generate(fused, **how)
        wanted_tokens, wanted = generate(stock, **how)
        assert torch.equal(tokens, wanted_tokens)
        assert distance(scores, wanted) < 1e-5
        steps = how.get("tokens", 12) - 1
        assert calls == {name: count * steps for name, count in each_step.items()}
