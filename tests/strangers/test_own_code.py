"""Tests that models with foreign code are sharded, replicated or refused, and that results equal the plain model's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from parallelformers_ng import ParallelError, parallelize, plan
from parallelformers_ng.errors import UnsupportedModelError
from tests.strangers.agreement import NEW_TOKENS, assert_agree, assert_agree_in_a_batch, prompt
from tests.strangers.changed_code import CHANGES, PATCHES, Clamped, followed_by, sparse_feed_forward
from tests.zoo.build import largest_difference
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import decoder
from tests.zoo.encoders import encoder
from tests.zoo.seq2seq import t5
from tests.zoo.state_space import recurrent


@pytest.mark.parametrize("name", CHANGES)
def test_changed_modules_give_the_plain_numbers(groups, name: str) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        CHANGES[name](model)
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        assert_agree_in_a_batch(cut, whole, [prompt(9), prompt(12, seed=2)])


@pytest.mark.parametrize("make", [t5, lambda: encoder("MPNet", attention="eager")], ids=["T5", "MPNet"])
def test_attentions_sharing_position_bias_are_cut_together(groups, make: Callable[[], Any]) -> None:
    whole, cut = make(), make()
    for model in (whole, cut):
        queries = [module for name, module in model.named_modules() if name.endswith((".SelfAttention.q", ".attn.q"))]
        queries[0].__class__ = Clamped
    inputs = seq2seq_inputs() if whole.config.is_encoder_decoder else text_inputs()
    with parallelize(cut, workers=groups(2)), torch.no_grad():
        assert largest_difference(cut(**inputs)[0], whole(**inputs)[0]) < 1e-4


def test_plan_lists_uncut_modules(caplog: pytest.LogCaptureFixture) -> None:
    model = decoder("Llama")
    sparse_feed_forward(model)
    shard_plan = plan(model)
    assert {path.rpartition(".")[2] for path in shard_plan.uncut} == {"mlp"}
    assert "its forward was replaced" in shard_plan.table()
    assert sum("computed whole on every rank" in record.message for record in caplog.records) == 1


def test_rules_of_tensors_in_foreign_mixers_stay_unused(groups) -> None:
    whole, cut = (recurrent("Mamba", state_size=8) for _ in range(2))
    for model in (whole, cut):
        for layer in model.backbone.layers:
            layer.mixer.forward = followed_by(torch.tanh, layer.mixer.forward)
    with parallelize(cut, workers=groups(2)):
        assert cut.shard_plan.source == "written"
        assert_agree(cut, whole, prompt())


@pytest.mark.parametrize("name", [name for name in PATCHES if name != "a product of torch"])
def test_patched_classes_and_globals_reach_the_ranks(groups, monkeypatch, name: str) -> None:
    make, owner, key, value = PATCHES[name]
    whole, cut = make(), make()
    logits, tokens = whole(prompt()).logits, whole.generate(prompt(), **NEW_TOKENS)
    monkeypatch.setattr(owner, key, value, raising=False)
    same = torch.allclose(whole(prompt()).logits, logits, atol=1e-3)
    assert not (same and torch.equal(whole.generate(prompt(), **NEW_TOKENS), tokens))
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        assert_agree_in_a_batch(cut, whole, [prompt(9), prompt(12, seed=2)])


def test_shared_activation_belongs_to_one_model(groups) -> None:
    shared = nn.LeakyReLU(0.1)
    models = [decoder("Llama"), decoder("Llama"), decoder("Llama")]
    for model in models:
        model.model.layers[0].mlp.act_fn = shared
    whole, first, second = models
    with parallelize(first, workers=groups(2)):
        with parallelize(second, 2, progress=False):
            shared.negative_slope = 0.7
            with pytest.raises(ParallelError, match=r"layers\.0\.mlp\.act_fn belongs to a parallelized model.*forward"):
                shared.forward = torch.tanh
            assert isinstance(pickle.loads(pickle.dumps(shared)), nn.LeakyReLU)
            assert_agree(second, whole, prompt())
        assert_agree(first, whole, prompt())
    assert type(shared) is nn.LeakyReLU


class Doubling(torch.Tensor):
    """A tensor whose class doubles its products."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output * 2 if func is nn.functional.linear else output


class Rounding(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return output.bfloat16().float() if func is torch.ops.aten.mm.default else output


class Negating(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        return -output if func is nn.functional.silu else output


def as_parameter(model: Any) -> None:
    up = model.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(up.weight.data.as_subclass(Doubling))


def as_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.as_subclass(Doubling)


@pytest.mark.parametrize("put", [as_parameter, as_buffer])
def test_tensors_of_own_classes_are_refused(put: Callable[[Any], None]) -> None:
    model = decoder("Llama")
    put(model)
    with pytest.raises(UnsupportedModelError, match=r"(up_proj\.weight|inv_freq) is a Doubling"):
        parallelize(model, 2)


@pytest.mark.parametrize("mode", [Rounding, Negating])
def test_modes_of_the_programs_are_refused(groups, mode: type) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    with parallelize(cut, workers=groups(2)):
        for call in (cut, cut.generate):
            with mode(), pytest.raises(ParallelError, match=f"the mode {mode.__name__} is active"):
                call(prompt())
        with torch.device("cpu"):
            assert_agree(cut, whole, prompt())
