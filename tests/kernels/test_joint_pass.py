"""Compares a prompt and a decode step in one call of C with the same prompt and step one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from parallelformers_ng.kernels import operators
from parallelformers_ng.kernels.joint_pass import JointPass, PromptStep
from parallelformers_ng.sharding.cache_names import CACHE
from tests.helpers.step_models import FAMILIES, distance, models, prompt

pytestmark = pytest.mark.skipif(operators._decode is None, reason="the C kernel is not built")
LAST = [4, 6]
"""Index of the last token of each of the two prompts, which have padding behind them."""


def caches(model: Any) -> tuple[DynamicCache, DynamicCache]:
    """Return an empty cache, and a cache with three sequences."""
    filled = DynamicCache(config=model.config)
    model(**prompt(3), **{CACHE: filled})
    return DynamicCache(config=model.config), filled


def first_step(cache: DynamicCache) -> dict[str, Any]:
    return {"input_ids": torch.arange(14).view(2, 7), CACHE: cache, "use_cache": True}


def other_step(cache: DynamicCache) -> dict[str, Any]:
    return {"input_ids": torch.arange(20, 25)[None], CACHE: cache, "use_cache": True}


def next_step(model: Any, cache: DynamicCache) -> Tensor:
    mask = torch.nn.functional.pad(prompt(3)["attention_mask"], (0, 1), value=1)
    logits: Tensor = model(torch.tensor([[5], [9], [2]]), attention_mask=mask, **{CACHE: cache}).logits
    return logits


def keys_of(*of_caches: DynamicCache) -> list[Tensor]:
    return [states for cache in of_caches for layer in cache.layers for states in (layer.keys, layer.values)]


def step_of(model: Any, inputs: dict[str, Any], last: list[int]) -> PromptStep:
    return PromptStep(lambda: model(**inputs).logits[range(len(last)), last], last)


def run_jointly(model: Any, last: list[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the logits of the prompts' last tokens, those of the rows, and all keys and values."""
    empty, filled = caches(model)
    joint, rows = JointPass.of(model), list[Tensor]()
    assert joint is not None
    step = step_of(model, first_step(empty), last)
    [logits] = joint.run([step], lambda: rows.append(next_step(model, filled)))
    return logits, rows[0], keys_of(empty, filled)


def run_in_turn(model: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
    empty, filled = caches(model)
    prompts = model(**first_step(empty)).logits[[0, 1], LAST]
    return prompts, next_step(model, filled), keys_of(empty, filled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_two_steps_run_in_one_call(family: str, dtype: torch.dtype, calls: Counter[str]) -> None:
    stock, fused = models(family, dtype, as_one=True)
    before = calls["decoder_layers"]
    caches(fused)
    for_caches = calls["decoder_layers"] - before
    calls.clear()
    prompts, rows, keys = run_jointly(fused, LAST)
    assert calls["decoder_layers"] == for_caches + 1
    in_turn = run_in_turn(fused)
    assert torch.equal(prompts, in_turn[0])
    assert torch.equal(rows, in_turn[1])
    assert all(map(torch.equal, keys, in_turn[2]))
    if dtype is torch.float32:
        wanted = run_in_turn(stock)
        assert distance(prompts, wanted[0]) < 1e-5
        assert distance(rows, wanted[1]) < 1e-5


def too_many_rows(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.model.layers.view(), "max_rows", 16)  # 14 and 3 are more


def without_kernel(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make single tokens run in the modules."""
    step_in_c = model.model.layers.step_in_c

    def for_prompts(hidden: Tensor, **kwargs: Any) -> Any:
        return step_in_c(hidden, **kwargs) if hidden.shape[1] > 1 else None

    monkeypatch.setattr(model.model.layers, "step_in_c", for_prompts, raising=False)


@pytest.mark.parametrize("prevent", [too_many_rows, without_kernel])
@torch.inference_mode()
def test_steps_that_do_not_fit_run_in_turn(
    prevent: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fused = models("llama", as_one=True)
    wanted = run_in_turn(fused)
    prevent(fused, monkeypatch)
    got = run_jointly(fused, LAST)
    assert distance(got[0], wanted[0]) < 1e-5
    assert distance(got[1], wanted[1]) < 1e-5
    assert fused.model.layers.instead is None


@pytest.mark.parametrize("has_rows", [True, False])
@torch.inference_mode()
def test_several_prompts_run_in_one_call(has_rows: bool, calls: Counter[str]) -> None:
    """A prompt with tokens left to run is between two complete ones."""
    stock, fused = models("llama", as_one=True)
    new_caches, filled = [DynamicCache(config=fused.config) for _ in range(3)], caches(fused)[1]
    steps = [step_of(fused, first_step(new_caches[0]), LAST), step_of(fused, other_step(new_caches[1]), [])]
    steps.append(step_of(fused, other_step(new_caches[2]), [4]))
    joint, rows = JointPass.of(fused), list[Tensor]()
    assert joint is not None
    calls.clear()
    got = joint.run(steps, (lambda: rows.append(next_step(fused, filled))) if has_rows else None)
    assert calls["decoder_layers"] == 1
    assert [len(each) for each in got] == [2, 0, 1]
    for model, most in ((fused, 0.0), (stock, 1e-5)):
        empty, before = caches(model)
        assert distance(got[0], model(**first_step(empty)).logits[[0, 1], LAST]) <= most
        other = DynamicCache(config=model.config)
        assert distance(got[2], model(**other_step(other)).logits[:, -1]) <= most
        assert all(
            distance(*each) <= most for each in zip(keys_of(*new_caches), keys_of(empty, other, other), strict=True)
        )
        assert not has_rows or distance(rows[0], next_step(model, before)) <= most


@torch.inference_mode()
def test_steps_beyond_the_limit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused = models("llama", as_one=True)
    new_caches = [DynamicCache(config=fused.config) for _ in range(3)]
    monkeypatch.setattr(fused.model.layers.view(), "max_rows", 14)  # two steps have 10 tokens, three have 15
    joint = JointPass.of(fused)
    assert joint is not None
    assert joint.max_tokens == 14
    got = joint.run([step_of(fused, other_step(cache), [4]) for cache in new_caches], None)
    assert torch.equal(*got)
    assert [cache.get_seq_length() for cache in new_caches] == [5, 5, 0]


@torch.inference_mode()
def test_unfinished_prompts_need_no_head() -> None:
    _, fused = models("llama", as_one=True)
    logits, rows, keys = run_jointly(fused, [])
    wanted = run_in_turn(fused)
    assert not logits.numel()
    assert torch.equal(rows, wanted[1])
    assert all(map(torch.equal, keys, wanted[2]))


@torch.inference_mode()
def test_steps_that_kernels_cannot_compute_do_not_run() -> None:
    _, fused = models("llama", as_one=True)
    hook = fused.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    joint = JointPass.of(fused)
    assert joint is not None
    assert joint.run([step_of(fused, first_step(caches(fused)[0]), LAST)], pytest.fail) == []
    hook.remove()
    assert fused.model.layers.instead is None


@torch.inference_mode()
def test_layers_one_by_one_run_a_step_once() -> None:
    """The model asks for fewer layers than it has, so that it does not call the stack."""
    _, fused = models("llama", as_one=True)
    fused.config.num_hidden_layers -= 1
    joint, cache = JointPass.of(fused), caches(fused)[0]
    assert joint is not None
    [logits] = joint.run([step_of(fused, first_step(cache), LAST)], pytest.fail)
    assert cache.get_seq_length() == 7
    assert torch.equal(logits, fused(**first_step(caches(fused)[0])).logits[[0, 1], LAST])
    assert fused.model.layers.instead is None


@torch.inference_mode()
def test_failed_step_leaves_no_trace() -> None:
    _, fused = models("llama", as_one=True)
    wanted = run_in_turn(fused)
    joint = JointPass.of(fused)
    assert joint is not None
    with pytest.raises(ZeroDivisionError):
        joint.run([step_of(fused, first_step(caches(fused)[0]), LAST)], lambda: 1 // 0)
    assert torch.equal(run_in_turn(fused)[1], wanted[1])


def test_hooks_and_other_models_run_in_turn() -> None:
    stock, fused = models("llama", as_one=True)
    assert JointPass.of(stock) is None
    hook = fused.lm_head.register_forward_pre_hook(lambda *_: None)
    assert JointPass.of(fused) is None, "the hook would run with one half of the rows"
    hook.remove()
    assert JointPass.of(fused) is not None
    fused.lm_head.forward = fused.lm_head.forward
    assert JointPass.of(fused) is None, "the forward would see the rows of prompts"
