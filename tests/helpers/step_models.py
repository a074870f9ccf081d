"""Makes small models with and without the C kernels of a decode step, and runs these models in several ways."""

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

from parallelformers_ng.kernels import decoder_stack, layer_halves, operators
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
    """Return a counter of later computations in C: of each half of a layer, and of all layers in one call."""
    seen: Counter[str] = Counter()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            seen[name] += 1
            return getattr(kernel, name)

    kernel = operators._decode
    install(LlamaForCausalLM(LlamaConfig(**TINY)))  # the first installation compares the kernels with transformers
    for module in (layer_halves, decoder_stack):
        monkeypatch.setattr(module, "_decode", Counting())
    return seen


def models(family: str, dtype: torch.dtype = torch.float32, as_one: bool = False, **settings: Any) -> tuple[Any, Any]:
    """Return a model with random parameters, norms and biases included, and a copy of the model with the C kernels.

    Args:
        family: name of the architecture.
        dtype: data type of the parameters.
        as_one: whether the copy may compute all layers in one call.
        settings: fields of the configuration.
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


def in_c(rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> int:
    """Return 1 if the kernels compute prompts of this size, 0 if torch does."""
    return int(rows * tokens <= operators.MAX_ROWS[dtype])


def prompt(rows: int, tokens: int = 7) -> dict[str, Tensor]:
    """Return `rows` sequences, all but the first padded on the left."""
    numbers = torch.Generator().manual_seed(rows)
    seen = torch.ones(rows, tokens, dtype=torch.long)
    seen[1:, : tokens // 2] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, tokens), generator=numbers), "attention_mask": seen}


def generate(model: Any, tokens: int = 12, rows: int = 3, **options: Any) -> tuple[Tensor, Tensor]:
    """Return tokens, and the scores of each step."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": tokens} | options
    torch.manual_seed(1)
    with torch.inference_mode():
        output = model.generate(**prompt(rows), output_logits=True, return_dict_in_generate=True, **settings)
    return output.sequences, torch.stack(output.logits)


def distance(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted.double()).norm() / wanted.double().norm()).item()


def cached_step(model: Any, cache: Any = None, **options: Any) -> Any:
    """Return the output for one token after a prompt, which the kernels compute as well."""
    with torch.inference_mode():
        cache = cache or DynamicCache(config=model.config)
        model(**prompt(1), past_key_values=cache)
        return model(torch.tensor([[5]]), past_key_values=cache, **options)


def step(model: Any, **options: Any) -> Tensor:
    """Return the scores of one token after a prompt."""
    scores: Tensor = cached_step(model, **options).logits
    return scores


def check_generations(family: str, as_one: bool, calls: Counter[str], each_step: dict[str, int]) -> None:
    """Generate in several ways with and without the kernels; compare tokens, scores, and the calls of C per step."""
    stock, fused = models(family, as_one=as_one)
    for options in ({}, {"num_beams": 3}, {"do_sample": True}, {"tokens": 150, "rows": 1}):
        calls.clear()
        tokens, scores = generate(fused, **options)
        wanted_tokens, wanted = generate(stock, **options)
        assert torch.equal(tokens, wanted_tokens)
        assert distance(scores, wanted) < 1e-5
        steps = options.get("tokens", 12) - 1 + in_c(options.get("rows", 3), 7)
        assert calls == {name: count * steps for name, count in each_step.items()}
