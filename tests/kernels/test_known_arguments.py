"""Compares the C kernels with the modelling code for arguments and settings that kernels could overlook."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from parallelformers_ng.kernels import operators
from parallelformers_ng.kernels.device_layer import DeviceStep
from parallelformers_ng.kernels.recognition import are_harmless
from parallelformers_ng.sharding.cache_names import CACHE
from tests.helpers.step_models import distance, models

needs_kernel = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")


def _scores(model: Any, **options: Any) -> Tensor:
    """Return the scores of a prompt, of one more token, and of four more tokens."""
    cache = DynamicCache(config=model.config)
    ids = torch.randint(0, 97, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        parts = ids[:, :4], ids[:, 4:5], ids[:, 5:]
        return torch.cat([model(part, **{CACHE: cache}, **options).logits for part in parts], 1)


OPTIONS: list[dict[str, Any]] = [
    {"is_causal": False}, {"is_causal": True}, {"is_causal": None}, {"sliding_window": 2},
    {"s_aux": torch.zeros(6)}, {"cache_position": None}, {"output_attentions": False}, {"anything": False},
]  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_arguments_of_a_call(options: dict[str, Any], as_one: bool) -> None:
    stock, fused = models("llama", as_one=as_one)
    assert distance(_scores(fused, **options), _scores(stock, **options)) < 1e-5


@needs_kernel
def test_arguments_that_attention_refuses_are_refused() -> None:
    stock, fused = models("llama", as_one=True)
    for options in ({"dropout": None}, {"scaling": False}, {"softcap": False}, {"is_causal": 0}):
        for model in (stock, fused):
            with pytest.raises((TypeError, ValueError)):
                _scores(model, **options)


def test_unknown_arguments_are_left_to_the_modules() -> None:
    assert are_harmless({"position_ids": torch.zeros(1), "output_attentions": None, "use_cache": False})
    for value in (False, None, 0):
        assert not are_harmless({"anything": value})


def test_device_layer_knows_the_same_arguments() -> None:
    angles = torch.zeros(1, 1, 4)
    arguments: dict[str, Any] = {
        "attention_mask": torch.ones(1, 1, 1, 8, dtype=torch.bool),
        "position_embeddings": (angles, angles),
        CACHE: StaticCache(config=models("llama")[0].config, max_cache_len=8),
    }
    hidden = torch.zeros(1, 1, 8)
    assert DeviceStep.of(hidden, **arguments, is_causal=False, output_attentions=False) is not None
    assert DeviceStep.of(hidden, **arguments, anything=False) is None


def _set_scaling(model: Any) -> None:
    model.model.layers[1].self_attn.scaling = 0.9


def _see_later_tokens(model: Any) -> None:
    model.config.is_causal = False


def _see_later_tokens_in_one_layer(model: Any) -> None:
    model.model.layers[1].self_attn.is_causal = False


def _set_epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 3.0


def _replace_activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.Tanh()


def _replace_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm = nn.Identity()


def _replace_layer(model: Any) -> None:
    layer = copy.deepcopy(model.model.layers[0])
    layer.self_attn.layer_idx = 1
    model.model.layers[1] = layer


def _train_attention(model: Any) -> None:
    model.model.layers[1].self_attn.attention_dropout = 0.99
    model.model.layers[1].self_attn.train()


CHANGES = [
    _set_scaling, _see_later_tokens, _see_later_tokens_in_one_layer, _set_epsilon, _replace_activation, _replace_norm,
    _replace_layer,
]  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("as_one", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_change_between_steps(change: Callable[[Any], None], as_one: bool) -> None:
    """A forward hook may set attributes at any step."""
    stock, fused = models("qwen3", as_one=as_one)
    before = _scores(fused)
    for model in (stock, fused):
        change(model)
    wanted = _scores(stock)
    assert distance(before, wanted) > 1e-3
    assert distance(_scores(fused), wanted) < 1e-5


@needs_kernel
@pytest.mark.parametrize("as_one", [True, False])
def test_attention_in_training_draws_its_dropout(as_one: bool) -> None:
    stock, fused = models("llama", as_one=as_one)
    _scores(fused)
    scores = []
    for model in (stock, fused):
        _train_attention(model)
        torch.manual_seed(2)
        scores.append(_scores(model))
    assert distance(*scores) < 1e-5


@needs_kernel
def test_single_tokens_of_encoders_run_in_c(calls: Counter[str]) -> None:
    _, fused = models("llama", as_one=True)
    _see_later_tokens(fused)
    _scores(fused)
    assert calls == {"decoder_layers": 1, "feed_half": 6}
