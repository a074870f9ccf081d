"""Tests attributes of modules and configurations that the program's code reads, if they change after `parallelize`."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from parallelformers_ng import ParallelError, parallelize
from tests.strangers.agreement import assert_agree, assert_agree_in_a_batch, prompt
from tests.zoo.decoders import decoder


class Scaled(LlamaDecoderLayer):
    """A layer with a factor from one of several places."""

    _scales = [1.0]
    _shift: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        states = super().forward(hidden_states, **others) * getattr(self, "factor", 1.0) * self._scales[0]
        config: Any = self.self_attn.config
        states = states * config.settings.factor * getattr(config, "late_factor", 1.0)
        return states if self._shift is None else states + self._shift


def scaled() -> Any:
    model = decoder("Llama")
    model.config.settings, model.config.late_factor = types.SimpleNamespace(factor=1.0), 1.25
    for layer in model.model.layers:
        layer.__class__, layer._scales, layer._shift = Scaled, [1.0], None
    return model


def of_layers(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda model: [change(layer) for layer in model.model.layers] and None


CHANGES: dict[str, list[Callable[[Any], None]]] = {
    "a new attribute": [of_layers(lambda layer: setattr(layer, "factor", 0.5))],
    "a deleted attribute": [
        of_layers(lambda layer: setattr(layer, "factor", 0.5)),
        of_layers(lambda layer: delattr(layer, "factor")),
    ],
    "a list in a private attribute": [of_layers(lambda layer: layer._scales.insert(0, 0.5))],
    "a new private list": [of_layers(lambda layer: setattr(layer, "_scales", [0.5]))],
    "a private tensor": [
        of_layers(lambda layer: setattr(layer, "_shift", torch.linspace(0, 1, 48))),
        of_layers(lambda layer: setattr(layer, "_shift", None)),
    ],
    "an object in a configuration": [lambda model: setattr(model.config.settings, "factor", 0.5)],
    "a deleted attribute of a configuration": [lambda model: delattr(model.config, "late_factor")],
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_that_own_code_reads(groups, name: str) -> None:
    whole, cut = scaled(), scaled()
    with parallelize(cut, workers=groups(2), batching=True):
        assert_agree(cut, whole, prompt())
        for change in CHANGES[name]:
            for model in (whole, cut):
                change(model)
            assert_agree(cut, whole, prompt())
            assert_agree_in_a_batch(cut, whole, [prompt(), prompt(seed=2)])


def test_attributes_that_hooks_read(groups) -> None:
    def scale(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * getattr(module, "factor", 1.0)

    whole, cut = decoder("Llama"), decoder("Llama")
    with parallelize(cut, workers=groups(2)):
        for model in (whole, cut):
            model.model.norm.register_forward_hook(scale)
            model.model.norm.factor = 0.5
        assert_agree(cut, whole, prompt())
        for model in (whole, cut):
            del model.model.norm.factor
        assert_agree(cut, whole, prompt())


@pytest.mark.parametrize("path", ["model.norm", "model.layers.0.mlp.act_fn"])
def test_deleting_a_replaced_forward_is_refused(groups, path: str) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        module = model.get_submodule(path)
        module.forward = types.MethodType(lambda self, states: type(self).forward(self, states) * 0.5, module)
    with parallelize(cut, workers=groups(2)):
        with pytest.raises(ParallelError, match="does not support deleting forward"):
            del cut.get_submodule(path).forward
        assert_agree(cut, whole, prompt())
