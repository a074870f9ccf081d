"""Tests code that a program changes after `parallelize`: the next call uses the code, or raises an error that names
it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.mixtral import modeling_mixtral

from parallelformers_ng import ParallelError, parallelize
from tests.strangers.agreement import assert_agree, assert_agree_in_a_batch, prompt
from tests.strangers.changed_code import (
    AFTERWARDS,
    PATCHES,
    Clamped,
    bounded,
    doubled,
    doubling,
    followed_by,
    largest_only,
)
from tests.zoo.build import largest_difference
from tests.zoo.decoders import EXPERTS, decoder, gpt2


@pytest.mark.parametrize("name", sorted(AFTERWARDS))
def test_later_patches_take_effect_and_can_be_undone(groups, name: str) -> None:
    make, owner, key, value = PATCHES[name]
    whole, cut = make(), make()
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, key, value, raising=False)
            assert_agree(cut, whole, prompt())
        assert_agree(cut, whole, prompt())


def test_proof_of_later_patch_leaves_weights_alone(groups, monkeypatch) -> None:
    """The proof's twin has the code of the running model, but none of the running model's state."""
    whole, cut = decoder("Llama"), decoder("Llama")
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", doubled)
    parallelize(cut, workers=groups(2))
    assert_agree(cut, whole, prompt())
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", doubling(modeling_llama.LlamaMLP.forward))
    assert_agree(cut, whole, prompt())
    assert {weight.dtype for weight in cut.parameters()} == {torch.float32}
    cut.deparallelize()
    for mine, plain in zip(cut.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, plain)


def mixtral() -> Any:
    return decoder("Mixtral", width=80, **EXPERTS)


REFUSED: dict[str, tuple[Callable[[], Any], Any, str, Any]] = {
    r"LlamaMLP\.forward": (lambda: decoder("Llama"), modeling_llama.LlamaMLP, "forward", largest_only),
    r"Linear\.forward": (lambda: decoder("Llama"), nn.Linear, "forward", Clamped.forward),
    "linear": (lambda: decoder("Llama"), nn.functional, "linear", followed_by(bounded, nn.functional.linear)),
    r"MixtralExperts\.forward": (
        mixtral,
        modeling_mixtral.MixtralExperts,
        "forward",
        followed_by(bounded, modeling_mixtral.MixtralExperts.forward),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_patches_that_need_another_cut_are_refused(groups, name: str) -> None:
    make, owner, key, value = REFUSED[name]
    whole, cut = make(), make()
    with parallelize(cut, workers=groups(2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, key, value)
            with pytest.raises(ParallelError, match=f"{name} was changed after the model was parallelized"):
                cut(prompt())
        assert_agree(cut, whole, prompt())


LIMIT = 0.1


class Limited(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-LIMIT, LIMIT)


def test_attributes_of_replicated_layers_may_change(groups, monkeypatch) -> None:
    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        model.model.layers[0].mlp.up_proj.__class__ = Limited
    with parallelize(cut, workers=groups(2)):
        for limit in (0.1, 0.02):
            monkeypatch.setitem(globals(), "LIMIT", limit)
            assert_agree(cut, whole, prompt())


def test_ranks_read_later_environment_variables(groups, monkeypatch) -> None:
    """A model's code reads a variable that the program sets, changes and deletes after `parallelize`."""
    usual = modeling_llama.LlamaMLP.forward

    def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
        return usual(self, x) * float(os.environ.get("SCALE_OF_A_TEST", "1"))

    whole, cut, prompts = decoder("Llama"), decoder("Llama"), [prompt(seed=seed) for seed in (1, 2, 3)]
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", scaled)
    with parallelize(cut, workers=groups(2), batching=True):
        plain = whole(prompts[0]).logits
        for scale in ("0.5", "0.25"):
            monkeypatch.setenv("SCALE_OF_A_TEST", scale)
            assert largest_difference(whole(prompts[0]).logits, plain) > 0.01
            assert_agree(cut, whole, prompts[0])
            assert_agree_in_a_batch(cut, whole, prompts)
        monkeypatch.delenv("SCALE_OF_A_TEST")
        assert_agree_in_a_batch(cut, whole, prompts)
        assert_agree(cut, whole, prompts[0])


def causal_alone(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    """Compute an attention without a mask, which is right for one prompt and wrong for the padded rows of a batch."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
    scores = (query @ key.transpose(2, 3) / query.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("make", [lambda: decoder("Llama"), gpt2], ids=["Llama", "GPT-2"])
def test_calls_share_no_batch_after_incompatible_patch(groups, make: Callable[[], Any]) -> None:
    whole, cut = make(), make()
    prompts = [prompt(length, seed=length) for length in (20, 9, 12, 15)]
    with parallelize(cut, workers=groups(2), batching={}):
        assert_agree_in_a_batch(cut, whole, prompts)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", causal_alone)
            assert_agree_in_a_batch(cut, whole, prompts)
        assert_agree_in_a_batch(cut, whole, prompts)


@pytest.mark.parametrize("name", ["factor", "scale"])
def test_later_changes_of_local_classes_reach_ranks(groups, name: str) -> None:
    class Scaled(modeling_llama.LlamaDecoderLayer):
        factor = 1.0

        def scale(self) -> float:
            return self.factor

        def forward(self, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
            return super().forward(hidden_states, **others) * self.scale()

    whole, cut = decoder("Llama"), decoder("Llama")
    for model in (whole, cut):
        model.model.layers[0].__class__ = Scaled
    with parallelize(cut, workers=groups(2)):
        assert_agree(cut, whole, prompt())
        setattr(Scaled, name, 0.5 if name == "factor" else lambda layer: 0.25)
        assert_agree(cut, whole, prompt())
