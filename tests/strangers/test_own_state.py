"""Tests the state that a program's code reads: the ranks have it, and follow or refuse changes inside its objects."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from parallelformers_ng import ParallelError, parallelize
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.live_code.state import State
from tests.strangers.agreement import assert_agree, assert_agree_in_a_batch, prompt
from tests.zoo.decoders import decoder


@dataclasses.dataclass
class Options:
    scale: float = 1.5


@dataclasses.dataclass(slots=True)
class SlottedOptions:
    scale: float = 1.5


class Knobs:
    scale = 1.5

    class Inner:
        scale = 1.5


TABLE, SCALES, OPTIONS, TENSOR = {"scale": 1.5}, [1.5], Options(), torch.tensor(1.5)
QUEUE, ARRAY, SLOTTED = collections.deque([1.5]), np.array([1.5]), SlottedOptions()
NAMES = types.SimpleNamespace(inner={"scale": 1.5})
NORMED = False

READS: dict[str, tuple[Callable[[], Any], Callable[[float], Any]]] = {
    "dictionary": (lambda: TABLE["scale"], lambda value: TABLE.update(scale=value)),
    "list": (lambda: SCALES[0], lambda value: SCALES.__setitem__(0, value)),
    "dataclass": (lambda: OPTIONS.scale, lambda value: setattr(OPTIONS, "scale", value)),
    "class": (lambda: Knobs.scale, lambda value: setattr(Knobs, "scale", value)),
    "nested class": (lambda: Knobs.Inner.scale, lambda value: setattr(Knobs.Inner, "scale", value)),
    "queue": (lambda: QUEUE[0], lambda value: QUEUE.__setitem__(0, value)),
    "array": (lambda: float(ARRAY[0]), lambda value: ARRAY.fill(value)),
    "slots": (lambda: SLOTTED.scale, lambda value: setattr(SLOTTED, "scale", value)),
    "tensor": (lambda: TENSOR, lambda value: TENSOR.fill_(value)),
    "namespace": (lambda: NAMES.inner["scale"], lambda value: NAMES.inner.update(scale=value)),
}


def scaled_by(read: Callable[[], Any]) -> type[nn.Linear]:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(input)) * read()

    return Scaled


@pytest.mark.parametrize("name", READS)
def test_changes_inside_globals_reach_the_ranks(groups, name: str) -> None:
    read, write = READS[name]
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        for layer in model.model.layers:
            layer.mlp.down_proj.__class__ = scaled_by(read)
    write(3.0)
    try:
        with parallelize(cut, workers=groups(2)):
            for value in (3.0, 6.0, 1.5):
                write(value)
                assert_agree(cut, whole, prompt())
                assert_agree_in_a_batch(cut, whole, [prompt(9), prompt(12, seed=2)])
    finally:
        write(1.5)


class Optional(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(input)) * self.options.scale * self.table["scale"]


def test_changes_inside_attributes_of_modules_reach_the_ranks(groups) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        for layer in model.model.layers:
            layer.mlp.down_proj.__class__ = Optional
            layer.mlp.down_proj.options, layer.mlp.down_proj.table = Options(), {"scale": 1.0}
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        for change in (
            lambda layer: setattr(layer.options, "scale", 4.0),
            lambda layer: layer.table.update(scale=2.0),
            lambda layer: setattr(layer, "options", Options(0.5)),
            lambda layer: setattr(layer.options, "scale", 2.5),
        ):
            for model in (whole, cut):
                for layer in model.model.layers:
                    change(layer.mlp.down_proj)
            assert_agree(cut, whole, prompt())


def test_changes_inside_assigned_functions_are_refused(groups) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    state = {"scale": 1.5}

    def scaling(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args: forward(*args) * state["scale"]

    for model in (whole, cut):
        for layer in model.model.layers:
            layer.mlp.forward = scaling(layer.mlp.forward)
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        state["scale"] = 2.0
        with pytest.raises(ParallelError, match=r"a value that model\.layers\.0\.mlp\.forward reads was changed"):
            cut(prompt())
        state["scale"] = 1.5
        assert_agree(cut, whole, prompt())


class NormedOrNot(modeling_llama.LlamaMLP):
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(states)) * self.up_proj(states)
        if NORMED or getattr(self, "normed", False) or getattr(self.config, "normed", False):
            inner = inner / inner.norm(dim=-1, keepdim=True)
        return self.down_proj(inner)


def with_own_feed_forward(normed: bool = False) -> Any:
    model = decoder("Llama")
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.normed = NormedOrNot, normed
    return model


def test_proof_depends_on_settings_and_globals(groups, monkeypatch) -> None:
    for normed, everywhere in ((False, False), (True, False), (False, True)):
        monkeypatch.setitem(globals(), "NORMED", everywhere)
        whole, cut = with_own_feed_forward(normed), with_own_feed_forward(normed)
        with parallelize(cut, workers=groups(2)):
            assert_agree(cut, whole, prompt())


def set_attributes(model: Any, value: bool) -> None:
    for layer in model.model.layers:
        layer.mlp.normed = value


@pytest.mark.parametrize(
    "change", [set_attributes, lambda model, value: setattr(model.config, "normed", value)], ids=["attribute", "config"]
)
def test_settings_that_need_another_cut_are_refused(groups, change: Callable[[Any, bool], None]) -> None:
    whole, cut = with_own_feed_forward(), with_own_feed_forward()
    with parallelize(cut, workers=groups(2)):
        change(cut, True)
        with pytest.raises(ParallelError, match=r"normed.* was changed after the model was parallelized"):
            cut(prompt())
        change(cut, False)
        assert_agree(cut, whole, prompt())


def gated(*args: Any, **kwargs: Any) -> Any:
    output, weights = sdpa_attention_forward(*args, **kwargs)
    return output * output.mean((-1, -2), keepdim=True).sigmoid(), weights


def register(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any] = gated) -> None:
    for registry, value in ((AttentionInterface, function), (AttentionMaskInterface, sdpa_mask)):
        monkeypatch.setitem(registry._global_mapping, name, value)


def test_attention_named_after_an_earlier_model_is_seen(groups, monkeypatch) -> None:
    with parallelize(decoder("Llama"), workers=groups(2)):
        pass
    register(monkeypatch, "gated")
    assert "gated" in ALL_ATTENTION_FUNCTIONS.valid_keys()
    whole, cut = decoder("Llama", attention="gated"), decoder("Llama", attention="gated")
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())


def test_method_added_after_an_earlier_model_is_seen(groups, monkeypatch) -> None:
    def over_all_columns(self: Any, states: torch.Tensor) -> torch.Tensor:
        return nn.Module.__call__(self, states) / (1 + self.gate_proj(states).norm(dim=-1, keepdim=True))

    with parallelize(decoder("Llama"), workers=groups(2)):
        pass
    monkeypatch.setattr(modeling_llama.LlamaMLP, "__call__", over_all_columns, raising=False)
    whole, cut = decoder("Llama"), decoder("Llama")
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())


def test_torchscript_modules_are_refused() -> None:
    model = decoder("Llama")
    model.model.layers[0].mlp.act_fn = torch.jit.script(nn.Sequential(nn.SiLU(), nn.Tanh()))
    with pytest.raises(UnsupportedModelError, match=r"layers\.0\.mlp\.act_fn is a TorchScript module"):
        parallelize(model, 2)


def test_equal_values_and_cycles_are_no_changes() -> None:
    table: dict[str, Any] = {"number": 1000.5}
    table["itself"] = table
    state = State(table)
    table["number"] = float("1000.5")
    assert state.holds()
    table["new"] = None
    assert not state.holds()
