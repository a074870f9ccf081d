"""Compares the halves of a decoder layer in C with the modelling code, and tests the cases that the modelling code
computes."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from parallelformers_ng.kernels import installation, operators
from tests.helpers.step_models import (
    FAMILIES,
    LAYERS,
    VOCABULARY,
    cached_step,
    check_generations,
    distance,
    generate,
    in_c,
    models,
    prompt,
    step,
)

pytestmark = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_and_scores_in_fp32(family: str, calls: Counter[str]) -> None:
    check_generations(family, False, calls, {"attention_half": LAYERS, "feed_half": LAYERS})


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_the_modelling_code(family: str, calls: Counter[str]) -> None:
    """Compare the kernels and the modelling code with fp64. The kernels' error may be at most a little larger than the
    modelling code's error."""
    stock, fused = models(family, torch.bfloat16)
    exact = copy.deepcopy(stock).double()
    tokens = torch.randint(0, VOCABULARY, (2, 9))

    def scores(model: Any) -> Tensor:
        with torch.inference_mode():
            cache = model(tokens[:, :2], use_cache=True).past_key_values
            steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(2, tokens.shape[1])]
        return torch.cat(steps, 1)

    got, usual, wanted = scores(fused), scores(stock), scores(exact)
    assert calls["attention_half"] == calls["feed_half"] == LAYERS * (tokens.shape[1] - 1)
    assert distance(got, wanted) < 1.2 * distance(usual, wanted) + 1e-3


def test_layer_with_experts_computes_attention_in_c(calls: Counter[str]) -> None:
    stock, fused = models("mixtral", num_local_experts=4, sliding_window=None)
    got, wanted = generate(fused), generate(stock)
    assert torch.equal(got[0], wanted[0])
    assert distance(got[1], wanted[1]) < 1e-5
    assert calls == {"attention_half": LAYERS * (11 + in_c(3, 7))}


def test_sliding_window_layer_computes_feed_forward_in_c(calls: Counter[str]) -> None:
    stock, fused = models("mistral", sliding_window=5)
    got, wanted = generate(fused), generate(stock)
    assert torch.equal(got[0], wanted[0])
    assert calls == {"feed_half": LAYERS * (11 + in_c(3, 7))}


def test_other_activations_are_left_to_torch(calls: Counter[str]) -> None:
    stock, fused = models("llama", hidden_act="gelu")
    got, wanted = generate(fused), generate(stock)
    assert torch.equal(got[0], wanted[0])
    assert calls == {"attention_half": LAYERS * (11 + in_c(3, 7))}


HOOKED: dict[str, tuple[Callable[[Any], nn.Module], set[str]]] = {
    "self_attn": (lambda layer: layer.self_attn, {"feed_half"}),
    "o_proj": (lambda layer: layer.self_attn.o_proj, {"feed_half"}),
    "input_layernorm": (lambda layer: layer.input_layernorm, {"feed_half"}),
    "mlp": (lambda layer: layer.mlp, {"attention_half"}),
    "act_fn": (lambda layer: layer.mlp.act_fn, {"attention_half"}),
    "post_attention_layernorm": (lambda layer: layer.post_attention_layernorm, {"attention_half"}),
}


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_with_a_hook_are_called(name: str, when: str, calls: Counter[str]) -> None:
    stock, fused = models("qwen3")
    module, c_calls = HOOKED[name]
    hook_calls: list[bool] = []
    for model in (stock, fused):
        for layer in model.model.layers:
            if when == "before":
                module(layer).register_forward_pre_hook(lambda *_: hook_calls.append(True))
            else:
                module(layer).register_forward_hook(lambda *inputs: hook_calls.append(True) or inputs[2])
    wanted = step(stock)
    of_stock, calls_of_stock = len(hook_calls), calls.total()
    assert distance(step(fused), wanted) < 1e-5
    assert calls_of_stock == 0
    assert len(hook_calls) == 2 * of_stock
    assert set(calls) == c_calls


def test_requested_hidden_states_cost_nothing_later(calls: Counter[str]) -> None:
    stock, fused = models("llama")
    calls.clear()
    requested_outputs = {"output_hidden_states": True, "output_attentions": True}
    got, wanted = (cached_step(model, **requested_outputs) for model in (fused, stock))
    assert len(got.hidden_states) == len(wanted.hidden_states) == LAYERS + 1
    assert all(distance(mine, its) < 1e-5 for mine, its in zip(got.hidden_states, wanted.hidden_states, strict=True))
    assert calls == {"attention_half": LAYERS, "feed_half": 2 * LAYERS}, (
        "the prompt runs in C; the next token runs attention in torch"
    )
    calls.clear()
    assert distance(step(fused), step(stock)) < 1e-5
    assert calls == {"attention_half": 2 * LAYERS, "feed_half": 2 * LAYERS}


def test_kernels_are_left_out_when_results_would_differ(calls: Counter[str]) -> None:
    stock, fused = models("llama")
    eager = copy.deepcopy(fused)
    eager.set_attn_implementation("eager")
    assert distance(step(eager), step(stock)) < 1e-5
    assert calls == {"feed_half": 2 * LAYERS}
    calls.clear()
    assert distance(step(fused, of_another_kind=torch.tensor([0, 1])), step(stock)) < 1e-5
    assert calls == {"attention_half": LAYERS, "feed_half": 2 * LAYERS}
    calls.clear()
    static = StaticCache(config=fused.config, max_cache_len=16)
    assert distance(step(fused, cache=static), step(stock)) < 1e-5
    assert calls == {"feed_half": 2 * LAYERS}
    calls.clear()
    with torch.enable_grad():
        cache = DynamicCache(config=fused.config)
        fused(**prompt(1), past_key_values=cache)
        fused(torch.tensor([[5]]), past_key_values=cache).logits.sum().backward()
    assert fused.model.layers[0].mlp.up_proj.weight.grad is not None
    assert not calls


def test_replaced_and_moved_weights_are_seen(calls: Counter[str]) -> None:
    stock, fused = models("qwen2")
    assert distance(step(fused), step(stock)) < 1e-5
    for model in (stock, fused):
        attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
        torch.manual_seed(5)
        attention.k_proj.weight = nn.Parameter(torch.randn_like(attention.k_proj.weight))
        attention.v_proj.bias = None
        mlp.down_proj.weight = nn.Parameter(torch.randn_like(mlp.down_proj.weight))
    calls.clear()
    assert distance(step(fused), step(stock)) < 1e-5
    assert calls == {"attention_half": 2 * LAYERS, "feed_half": 2 * LAYERS}
    columns = torch.randn(96, 200).t().contiguous().t()
    for model in (stock, fused):
        model.model.layers[2].mlp.down_proj.weight = nn.Parameter(columns)
    calls.clear()
    assert distance(step(fused), step(stock)) < 1e-5
    assert calls == {"attention_half": 2 * LAYERS, "feed_half": 2 * (LAYERS - 1)}


def test_cast_weights_are_read_at_their_new_place(calls: Counter[str]) -> None:
    stock, fused = models("llama")
    step(fused)
    stock.to(torch.bfloat16), fused.to(torch.bfloat16)
    calls.clear()
    assert distance(step(fused), step(stock)) < 2e-2
    assert calls == {"attention_half": 2 * LAYERS, "feed_half": 2 * LAYERS}


def test_states_of_another_width_raise_as_before(calls: Counter[str]) -> None:
    stock, fused = models("llama")
    calls.clear()
    for model in (stock, fused):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(**prompt(1), past_key_values=cache)
            calls.clear()
            with pytest.raises(RuntimeError):
                model(inputs_embeds=torch.randn(1, 1, 48), past_key_values=cache)
        assert not calls


@FLOATS
def test_wide_batches_are_left_to_torch(dtype: torch.dtype, calls: Counter[str]) -> None:
    _, fused = models("llama", dtype)
    most = operators.MAX_ROWS[dtype]
    generate(fused, rows=most, tokens=2)
    assert calls == {"attention_half": LAYERS, "feed_half": LAYERS}
    generate(fused, rows=most + 1, tokens=2)
    assert calls == {"attention_half": LAYERS, "feed_half": LAYERS}


def test_other_attention_functions_are_called(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    stock, fused = models("llama")
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *args, **kwargs: sdpa_attention_forward(*args, **kwargs)
    )
    assert distance(step(fused), step(stock)) < 1e-5
    assert calls == {"feed_half": 2 * LAYERS}


def test_layers_with_new_meaning_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: Counter[str]
) -> None:
    """A later release could change the meaning of a layer with the same name and code. This test changes
    `rotate_half`, which the layer calls."""
    models("llama")
    assert installation.layers_agree.__wrapped__()
    monkeypatch.setattr(installation, "layers_agree", functools.cache(installation.layers_agree.__wrapped__))
    assert calls
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -x)
    assert not installation.layers_agree()
    assert "layers are computed by the modelling code: results of the kernels differ" in caplog.text
    stock, fused = models("llama")
    calls.clear()
    assert torch.equal(generate(fused)[0], generate(stock)[0])
    assert not calls
