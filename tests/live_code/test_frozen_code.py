"""Tests code that changes after `parallelize`: the next call refuses it by name, until it is restored."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from parallelformers_ng import ParallelError, parallelize
from tests.strangers.agreement import assert_agree, prompt
from tests.strangers.changed_code import PATCHES, Clamped, bounded, followed_by
from tests.zoo.decoders import decoder

pytestmark = pytest.mark.promise("frozen-code")
FROZEN = "was changed after the model was parallelized, and the workers keep the code"

LATER: dict[str, tuple[Callable[[], Any], Any, str, Any]] = {
    **PATCHES,
    "a function of torch": (
        lambda: decoder("Llama"),
        nn.functional,
        "linear",
        followed_by(bounded, nn.functional.linear),
    ),
    "a product of torch": (lambda: decoder("Llama"), nn.Linear, "forward", Clamped.forward),
    "a registered attention": (
        lambda: decoder("Llama"),
        ALL_ATTENTION_FUNCTIONS._local_mapping,
        "sdpa",
        modeling_llama.eager_attention_forward,
    ),
    "an attention of all registries": (
        lambda: decoder("Llama"),
        ALL_ATTENTION_FUNCTIONS._global_mapping,
        "sdpa",
        modeling_llama.eager_attention_forward,
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_patched_libraries_are_refused_until_restored(groups, name: str) -> None:
    make, owner, key, value = LATER[name]
    whole, cut = make(), make()
    with parallelize(cut, workers=groups(2)):
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(owner, dict):
                patch.setitem(owner, key, value)
            else:
                patch.setattr(owner, key, value, raising=False)
            with pytest.raises(ParallelError, match=f"{key}.* {FROZEN}"):
                cut.generate(prompt())
        assert_agree(cut, whole, prompt())


def by_table(states: torch.Tensor) -> torch.Tensor:
    return states * 0.5


def scaled(states: torch.Tensor, by: float = 0.5, *, more: float = 1.0) -> torch.Tensor:
    return states * by * more * math.sqrt(4.0) * getattr(scaled, "factor", 1.0)


HANDLERS = {"scaled": by_table}


class Scaling:
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return states * 0.5

    def shift(self, states: torch.Tensor) -> torch.Tensor:
        return states + 0.5


class OtherScaling(Scaling):
    def shift(self, states: torch.Tensor) -> torch.Tensor:
        return states - 0.5


SCALING = Scaling()


class OwnMLP(modeling_llama.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(SCALING.shift(SCALING(HANDLERS["scaled"](scaled(super().forward(x))))))

    def scaled(self, states: torch.Tensor) -> torch.Tensor:
        return states * 2

    @property
    def width(self) -> int:
        return 1


def own() -> Any:
    model = decoder("Llama")
    for layer in model.model.layers:
        layer.mlp.__class__ = OwnMLP
    return model


def tripled(self: Any, states: torch.Tensor) -> torch.Tensor:
    return states * 3


def by_three(states: torch.Tensor, by: float = 0.5, *, more: float = 1.0) -> torch.Tensor:
    return states * 3


CHANGES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "method": (lambda patch: patch.setattr(OwnMLP, "scaled", tripled), "OwnMLP.scaled"),
    "code of a method": (lambda patch: patch.setattr(OwnMLP.scaled, "__code__", tripled.__code__), "OwnMLP.scaled"),
    "function": (lambda patch: patch.setitem(globals(), "scaled", by_three), "scaled"),
    "code of a function": (lambda patch: patch.setattr(scaled, "__code__", by_three.__code__), "scaled"),
    "defaults": (lambda patch: patch.setattr(scaled, "__defaults__", (0.25,)), "scaled"),
    "keyword defaults": (lambda patch: patch.setattr(scaled, "__kwdefaults__", {"more": 2.0}), "scaled"),
    "attribute of a function": (lambda patch: patch.setattr(scaled, "factor", 2.0, raising=False), "scaled"),
    "function of a library": (lambda patch: patch.setattr(math, "sqrt", lambda number: 3.0), "math.sqrt"),
    "function in a table": (lambda patch: patch.setitem(HANDLERS, "scaled", by_three), "HANDLERS"),
    "code of a function in a table": (
        lambda patch: patch.setattr(by_table, "__code__", (lambda states: states * 4).__code__),
        r"HANDLERS\[scaled\]",
    ),
    "method of an object": (lambda patch: patch.setattr(Scaling, "shift", tripled), "Scaling.shift"),
    "call of an object": (lambda patch: patch.setattr(Scaling, "__call__", tripled), "Scaling.__call__"),
    "method on an object": (
        lambda patch: patch.setattr(SCALING, "shift", types.MethodType(tripled, SCALING), raising=False),
        "SCALING",
    ),
    "class of an object": (lambda patch: patch.setattr(SCALING, "__class__", OtherScaling), "SCALING"),
    "deleted method": (lambda patch: patch.delattr(OwnMLP, "scaled"), "OwnMLP.scaled"),
    "property": (lambda patch: patch.setattr(OwnMLP, "act_fn", property(lambda self: abs), raising=False), "act_fn"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_code_of_program_is_refused_until_restored(groups, name: str) -> None:
    change, place = CHANGES[name]
    whole, cut = own(), own()
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            with pytest.raises(ParallelError, match=f"{place}.* {FROZEN}"):
                cut(prompt())
        assert_agree(cut, whole, prompt())


def test_attention_registered_later_is_refused(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    with parallelize(cut, workers=groups(2)):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "own", tripled)
        assert_agree(cut, whole, prompt())  # registered, but not used
        cut.config._attn_implementation = "own"
        with pytest.raises(ParallelError, match=r"_attn_implementation was changed to 'own', which runs .*code that"):
            cut(prompt())
        for model in (whole, cut):
            model.config._attn_implementation = "eager"
        assert_agree(cut, whole, prompt())


def test_equal_code_is_no_change(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that reload a module get new functions, or new code in the old ones, that compute the same."""
    whole, cut = own(), own()
    with parallelize(cut, workers=groups(2)):
        copied = types.FunctionType(scaled.__code__, globals(), "scaled", scaled.__defaults__)
        copied.__kwdefaults__ = dict(scaled.__kwdefaults__)
        monkeypatch.setitem(globals(), "scaled", copied)
        monkeypatch.setattr(OwnMLP.scaled, "__code__", OwnMLP.scaled.__code__.replace(co_firstlineno=1))
        assert_agree(cut, whole, prompt())
        monkeypatch.setattr(copied, "__defaults__", (0.75,))
        with pytest.raises(ParallelError, match="scaled was changed after"):
            cut(prompt())
