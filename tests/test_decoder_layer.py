"""A decoder layer's halves in C against transformers' own, and where they stand back."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
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
    StaticCache,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from parallelformers_ng.kernels import installation, layer_halves
from parallelformers_ng.kernels.installation import install

pytestmark = pytest.mark.skipif(layer_halves._decode is None, reason="the C kernel is not built")

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
LAYERS, VOCABULARY = 3, 97
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama with every bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama with odd sizes": (LlamaConfig, LlamaForCausalLM, {"head_dim": 10, "intermediate_size": 131}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a worker on one core has it, where the kernels are of use."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each half was computed in C."""
    seen: Counter[str] = Counter()

    class Counting:
        @staticmethod
        def attention_half(*arguments: Any) -> None:
            seen["attention"] += 1
            kernel.attention_half(*arguments)

        @staticmethod
        def feed_half(*arguments: Any) -> None:
            seen["feed"] += 1
            kernel.feed_half(*arguments)

    kernel = layer_halves._decode
    monkeypatch.setattr(layer_halves, "_decode", Counting)
    return seen


def _models(family: str, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Any, Any]:
    """A model with random parameters, norms and biases too, and its copy with the kernels."""
    config, model, special = FAMILIES.get(family, (MixtralConfig, MixtralForCausalLM, {}))
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 2}
    lengths = {"num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    torch.manual_seed(0)
    stock = model(config(**sizes | lengths | special | settings)).to(dtype)
    for parameter in stock.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    stock.eval()
    fused = copy.deepcopy(stock)
    assert install(fused)
    return stock, fused


def _prompt(rows: int, tokens: int = 7) -> dict[str, Tensor]:
    """Some sequences, all but the first with padding before them."""
    torch.manual_seed(rows)
    seen = torch.ones(rows, tokens, dtype=torch.long)
    seen[1:, : tokens // 2] = 0
    return {"input_ids": torch.randint(0, VOCABULARY, (rows, tokens)), "attention_mask": seen}


def _generate(model: Any, tokens: int = 12, rows: int = 3, **how: Any) -> tuple[Tensor, Tensor]:
    """Tokens, and the scores that led to them."""
    settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": tokens} | how
    torch.manual_seed(1)
    with torch.inference_mode():
        made = model.generate(**_prompt(rows), output_logits=True, return_dict_in_generate=True, **settings)
    return made.sequences, torch.stack(made.logits)


def _distance(found: Tensor, wanted: Tensor) -> float:
    return ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens_and_scores_in_fp32(family: str, calls: Counter[str]) -> None:
    stock, fused = _models(family)
    for how in ({}, {"num_beams": 3}, {"do_sample": True}, {"tokens": 150, "rows": 1}):
        calls.clear()
        tokens, scores = _generate(fused, **how)
        wanted_tokens, wanted = _generate(stock, **how)
        assert torch.equal(tokens, wanted_tokens)
        assert _distance(scores, wanted) < 1e-5
        steps = how.get("tokens", 12) - 1
        assert calls == {"attention": LAYERS * steps, "feed": LAYERS * steps}


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_exact_as_the_modelling_code(family: str, calls: Counter[str]) -> None:
    """Both differ from the same model in fp64; the kernel by no more than the operators do."""
    stock, fused = _models(family, torch.bfloat16)
    exact = copy.deepcopy(stock).double()
    tokens = torch.randint(0, VOCABULARY, (2, 9))

    def scores(model: Any) -> Tensor:
        with torch.inference_mode():
            cache = model(tokens[:, :2], use_cache=True).past_key_values
            steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(2, tokens.shape[1])]
        return torch.cat(steps, 1)

    found, usual, wanted = scores(fused), scores(stock), scores(exact)
    assert calls["attention"] == calls["feed"] == LAYERS * (tokens.shape[1] - 2)
    assert _distance(found, wanted) < 1.2 * _distance(usual, wanted) + 1e-3


def test_a_layer_with_experts_has_its_attention_computed_in_c(calls: Counter[str]) -> None:
    stock, fused = _models("mixtral", num_local_experts=4, sliding_window=None)
    found, wanted = _generate(fused), _generate(stock)
    assert torch.equal(found[0], wanted[0])
    assert _distance(found[1], wanted[1]) < 1e-5
    assert calls == {"attention": LAYERS * 11}


def test_a_layer_with_a_sliding_window_has_its_feed_forward_computed_in_c(calls: Counter[str]) -> None:
    stock, fused = _models("mistral", sliding_window=5)
    found, wanted = _generate(fused), _generate(stock)
    assert torch.equal(found[0], wanted[0])
    assert calls == {"feed": LAYERS * 11}


def test_other_activations_are_left_to_torch(calls: Counter[str]) -> None:
    stock, fused = _models("llama", hidden_act="gelu")
    found, wanted = _generate(fused), _generate(stock)
    assert torch.equal(found[0], wanted[0])
    assert calls == {"attention": LAYERS * 11}


def _cached_step(model: Any, cache: Any = None, **how: Any) -> Any:
    """The output for one token behind a prompt."""
    with torch.inference_mode():
        cache = cache or DynamicCache(config=model.config)
        model(**_prompt(1), past_key_values=cache)
        return model(torch.tensor([[5]]), past_key_values=cache, **how)


def _step(model: Any, **how: Any) -> Tensor:
    """Scores of one token behind a prompt."""
    scores: Tensor = _cached_step(model, **how).logits
    return scores


HOOKED: dict[str, tuple[Callable[[Any], nn.Module], set[str]]] = {
    "self_attn": (lambda layer: layer.self_attn, {"feed"}),
    "o_proj": (lambda layer: layer.self_attn.o_proj, {"feed"}),
    "input_layernorm": (lambda layer: layer.input_layernorm, {"feed"}),
    "mlp": (lambda layer: layer.mlp, {"attention"}),
    "act_fn": (lambda layer: layer.mlp.act_fn, {"attention"}),
    "post_attention_layernorm": (lambda layer: layer.post_attention_layernorm, {"attention"}),
}


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("when", ["before", "after"])
def test_modules_with_a_hook_are_called(name: str, when: str, calls: Counter[str]) -> None:
    stock, fused = _models("qwen3")
    module, left = HOOKED[name]
    heard: list[bool] = []
    for model in (stock, fused):
        for layer in model.model.layers:
            if when == "before":
                module(layer).register_forward_pre_hook(lambda *_: heard.append(True))
            else:
                module(layer).register_forward_hook(lambda *inputs: heard.append(True) or inputs[2])
    wanted = _step(stock)
    of_stock, calls_of_stock = len(heard), calls.total()
    assert _distance(_step(fused), wanted) < 1e-5
    assert calls_of_stock == 0
    assert len(heard) == 2 * of_stock
    assert set(calls) == left


def test_hidden_states_that_were_asked_for_once_cost_nothing_later(calls: Counter[str]) -> None:
    stock, fused = _models("llama")
    calls.clear()
    asked = {"output_hidden_states": True, "output_attentions": True}
    found, wanted = (_cached_step(model, **asked) for model in (fused, stock))
    assert len(found.hidden_states) == len(wanted.hidden_states) == LAYERS + 1
    assert all(_distance(mine, its) < 1e-5 for mine, its in zip(found.hidden_states, wanted.hidden_states, strict=True))
    assert set(calls) == {"feed"}
    calls.clear()
    assert _distance(_step(fused), _step(stock)) < 1e-5
    assert calls == {"attention": LAYERS, "feed": LAYERS}


def test_stands_back_where_its_results_are_not_what_is_asked_for(calls: Counter[str]) -> None:
    stock, fused = _models("llama")
    eager = copy.deepcopy(fused)
    eager.set_attn_implementation("eager")
    assert _distance(_step(eager), _step(stock)) < 1e-5
    assert calls == {"feed": LAYERS}
    calls.clear()
    assert _distance(_step(fused, of_another_kind=torch.tensor([0, 1])), _step(stock)) < 1e-5
    assert calls == {"feed": LAYERS}
    calls.clear()
    static = StaticCache(config=fused.config, max_cache_len=16)
    assert _distance(_step(fused, cache=static), _step(stock)) < 1e-5
    assert calls == {"feed": LAYERS}
    calls.clear()
    with torch.enable_grad():
        cache = DynamicCache(config=fused.config)
        fused(**_prompt(1), past_key_values=cache)
        fused(torch.tensor([[5]]), past_key_values=cache).logits.sum().backward()
    assert fused.model.layers[0].mlp.up_proj.weight.grad is not None
    assert not calls


def test_replaced_and_moved_weights_are_seen(calls: Counter[str]) -> None:
    stock, fused = _models("qwen2")
    assert _distance(_step(fused), _step(stock)) < 1e-5
    for model in (stock, fused):
        attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
        torch.manual_seed(5)
        attention.k_proj.weight = nn.Parameter(torch.randn_like(attention.k_proj.weight))
        attention.v_proj.bias = None
        mlp.down_proj.weight = nn.Parameter(torch.randn_like(mlp.down_proj.weight))
    calls.clear()
    assert _distance(_step(fused), _step(stock)) < 1e-5
    assert calls == {"attention": LAYERS, "feed": LAYERS}
    columns = torch.randn(96, 200).t().contiguous().t()
    for model in (stock, fused):
        model.model.layers[2].mlp.down_proj.weight = nn.Parameter(columns)
    calls.clear()
    assert _distance(_step(fused), _step(stock)) < 1e-5
    assert calls == {"attention": LAYERS, "feed": LAYERS - 1}


def test_weights_that_were_cast_are_read_where_they_are_now(calls: Counter[str]) -> None:
    stock, fused = _models("llama")
    _step(fused)
    stock.to(torch.bfloat16), fused.to(torch.bfloat16)
    calls.clear()
    assert _distance(_step(fused), _step(stock)) < 2e-2
    assert calls == {"attention": LAYERS, "feed": LAYERS}


def test_states_of_another_width_are_an_error_as_ever(calls: Counter[str]) -> None:
    stock, fused = _models("llama")
    calls.clear()
    for model in (stock, fused):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(**_prompt(1), past_key_values=cache)
            with pytest.raises(RuntimeError):
                model(inputs_embeds=torch.randn(1, 1, 48), past_key_values=cache)
    assert not calls


@FLOATS
def test_wide_batches_are_left_to_torch(dtype: torch.dtype, calls: Counter[str]) -> None:
    _, fused = _models("llama", dtype)
    most = layer_halves.MOST_ROWS[dtype]
    _generate(fused, rows=most, tokens=2)
    assert calls == {"attention": LAYERS, "feed": LAYERS}
    _generate(fused, rows=most + 1, tokens=2)
    assert calls == {"attention": LAYERS, "feed": LAYERS}


def test_a_user_of_another_attention_function_gets_it(monkeypatch: pytest.MonkeyPatch, calls: Counter[str]) -> None:
    stock, fused = _models("llama")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", lambda *inputs, **how: sdpa_attention_forward(*inputs, **how))
    assert _distance(_step(fused), _step(stock)) < 1e-5
    assert calls == {"feed": LAYERS}


def test_layers_that_mean_something_new_are_left_to_transformers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, calls: Counter[str]
) -> None:
    """As in a later release, under the old names and with the same code: here, one that rotates the other way."""
    assert installation.install(_models("llama")[0])
    monkeypatch.setattr(installation, "_layers_agree", installation._layers_agree.__wrapped__)
    assert installation._layers_agree()
    assert calls
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: -x)
    assert not installation._layers_agree()
    assert "left to transformers" in caplog.text
    stock, fused = _models("llama")
    calls.clear()
    assert torch.equal(_generate(fused)[0], _generate(stock)[0])
    assert not calls
