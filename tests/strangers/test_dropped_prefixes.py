"""Tests that every change that reaches the ranks drops the ranks' cached state of earlier calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.strangers.agreement import NEW_TOKENS, assert_agree, assert_agree_in_a_batch, prompt
from tests.zoo.decoders import decoder, gpt2


def scaled(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 3.0


def unscaled(model: Any) -> None:
    for layer in model.transformer.h:
        layer.attn.scale_attn_weights = False


def shallower(model: Any) -> None:
    model.config.num_hidden_layers = 1


def other_epsilon(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5


def leakier(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.negative_slope = 0.7


def rectified(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn.act = torch.nn.functional.relu


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "an attribute of attention": (lambda: decoder("Llama"), scaled),
    "an attribute of a norm": (lambda: decoder("Llama"), other_epsilon),
    "an attribute of an activation": (lambda: decoder("Llama", hidden_act="leaky_relu"), leakier),
    "a function of an activation": (lambda: decoder("Llama", hidden_act="gelu"), rectified),
    "a switch of attention": (gpt2, unscaled),
    "a configuration": (lambda: decoder("Llama"), shallower),
}


@pytest.mark.parametrize("name", CHANGES)
def test_prefixes_of_a_changed_model_are_dropped(groups, name: str) -> None:
    make, change = CHANGES[name]
    whole, cut = make(), parallelize(make(), workers=groups(2), batching=True)
    ids = prompt(20)
    longer = torch.cat([ids, prompt(3, seed=2)], 1)
    assert_agree(cut, whole, ids)
    for model in (cut, whole):
        change(model)
    assert_agree(cut, whole, longer)
    assert_agree_in_a_batch(cut, whole, [longer, ids, torch.cat([longer, ids[:, :4]], 1)])
    cut.deparallelize()


def test_sequence_begun_before_a_change_is_dropped(groups) -> None:
    make, change = CHANGES["an attribute of attention"]
    whole, cut = make(), parallelize(make(), workers=groups(2), batching=True)
    ids, begun = prompt(20), threading.Event()

    class Streamer:
        def put(self, tokens: torch.Tensor) -> None:
            if tokens.numel() == 1:
                begun.set()

        def end(self) -> None: ...

    long = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "streamer": Streamer()}
    earlier: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: earlier.append(cut.generate(ids, **long)))
    thread.start()
    assert begun.wait(30)
    for model in (cut, whole):
        change(model)
    assert cut.generate(ids[:, :3], **NEW_TOKENS).tolist() == whole.generate(ids[:, :3], **NEW_TOKENS).tolist()
    thread.join()
    follow_up = earlier[0][:, :-1]
    assert cut.generate(follow_up, **NEW_TOKENS).tolist() == whole.generate(follow_up, **NEW_TOKENS).tolist()
    cut.deparallelize()


@pytest.mark.parametrize("place", ["model.norm", "model"])
def test_attributes_set_by_hooks_affect_later_calls(groups, place: str) -> None:
    """A hook changes an attribute after the beginning of a prompt has been cached."""
    whole, cut = decoder("Llama"), parallelize(decoder("Llama"), workers=groups(2), batching=True)
    ids = prompt(20)
    assert_agree(cut, whole, ids)

    def sharpen(module: nn.Module, args: Any, output: Any) -> None:
        for part in module.modules():
            if hasattr(part, "variance_epsilon"):
                part.variance_epsilon = 0.5

    for model in (cut, whole):
        handle = model.get_submodule(place).register_forward_hook(sharpen)
        with torch.no_grad():
            model(ids)
        handle.remove()
    assert_agree(cut, whole, torch.cat([ids, prompt(3, seed=2)], 1))
    cut.deparallelize()


def test_a_dropped_model_leaves_no_step() -> None:
    with WorkerGroup(2, target="tests.strangers.watched_runner:WatchedRunner", timeout=60) as group:
        cut = parallelize(decoder("Llama"), workers=group)
        cut.generate(prompt(5), **NEW_TOKENS)
        assert group.call("kept_steps") == 1
        cut.deparallelize()
        assert group.call("kept_steps") == 0
