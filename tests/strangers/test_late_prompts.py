"""Tests prompts that join while other rows decode, if the model cannot run both in one pass through its layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from parallelformers_ng import parallelize
from tests.strangers.agreement import NEW_TOKENS, prompt
from tests.zoo.build import build
from tests.zoo.decoders import decoder

LONG = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False}


class BiasOfIds(LlamaForCausalLM):
    """A model whose logits also depend on the ids of the new tokens."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        output = super().forward(input_ids=input_ids, **others)
        ids = input_ids[:, -output.logits.shape[1] :, None]
        output.logits = output.logits + 2 * torch.sin(ids * torch.arange(output.logits.shape[-1]))
        return output


class Watch:
    """A streamer that sets an event at the first new token."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()

    def put(self, tokens: torch.Tensor) -> None:
        if tokens.ndim == 1:
            self.has_begun.set()

    def end(self) -> None: ...


def assert_late_prompts_agree(cut: Any, whole: Any) -> None:
    """Compare callers with the plain model; all callers but the first begin while the first call decodes."""
    prompts, watch = [prompt(length, seed=length) for length in (8, 20, 5, 11)], Watch()
    with ThreadPoolExecutor(len(prompts)) as threads:
        first = threads.submit(cut.generate, prompts[0], streamer=watch, **LONG)
        assert watch.has_begun.wait(30)
        others = [*threads.map(lambda ids: cut.generate(ids, **NEW_TOKENS).tolist(), prompts[1:])]
    assert first.result().tolist() == whole.generate(prompts[0], **LONG).tolist()
    assert others == [whole.generate(ids, **NEW_TOKENS).tolist() for ids in prompts[1:]]


def llama() -> Any:
    return decoder("Llama")


def nothing(_: Any) -> None: ...


def without_last_layer(model: Any) -> None:
    model.config.num_hidden_layers -= 1


def with_fewer_layers() -> Any:
    """Return a model whose caches have a layer that the model does not fill."""
    model = decoder("Llama", layers=3)
    model.model.layers = model.model.layers[:2]
    return model


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "windows in some layers": (
        lambda: decoder("Qwen3", use_sliding_window=True, sliding_window=4, max_window_layers=1),
        nothing,
    ),
    "fewer layers than there are": (llama, without_last_layer),
    "a layer without keys": (with_fewer_layers, nothing),
    "logits that depend on ids": (lambda: build(BiasOfIds, llama().config), nothing),
}


@pytest.mark.parametrize("name", CASES)
def test_late_prompts_get_the_plain_tokens(groups, name: str) -> None:
    make, change = CASES[name]
    whole, cut = make(), make()
    with parallelize(cut, workers=groups(2), batching=True):
        for model in (whole, cut):
            change(model)
        assert_late_prompts_agree(cut, whole)
