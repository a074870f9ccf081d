"""Tests masks of decode steps: a mask that hides nothing is left out, and no step reads the mask to find out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils

from parallelformers_ng.generation import step_masks
from parallelformers_ng.generation.step_masks import known_masks
from tests.zoo.case import seq2seq_inputs, text_inputs
from tests.zoo.decoders import decoder
from tests.zoo.seq2seq import t5

HOW: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
ASKED = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")


@pytest.fixture
def mask_reads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets, for each read of a mask by transformers, whether the read happened in a decode step."""
    seen: list[bool] = []
    for name in ASKED:
        question = getattr(masking_utils, name)

        def noted(mask: Any, *args: Any, question: Any = question) -> bool:
            if mask is not None:
                seen.append(any(loop.in_step for loop in step_masks._loops))
            return question(mask, *args)

        monkeypatch.setattr(masking_utils, name, noted)
    step_masks.answer_for_steps()
    return seen


def masks_received(model: Any) -> list[bool]:
    """Return a list that gets, for each forward, whether it received a mask of two dimensions."""
    received: list[bool] = []
    forward = model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        received.append(getattr(kwargs.get("attention_mask"), "ndim", 0) == 2)
        return forward(*args, **kwargs)

    model.forward = noted
    return received


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("padded", [False, True])
def test_decode_steps_do_not_read_their_mask(family: str, beams: int, padded: bool, mask_reads: list[bool]) -> None:
    model, inputs = (decoder("Llama"), text_inputs()) if family == "llama" else (t5(), seq2seq_inputs())
    inputs.pop("decoder_input_ids", None)
    if not padded:
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    want = model.generate(**inputs, **HOW, num_beams=beams)
    received = masks_received(model)
    with torch.inference_mode(), known_masks([model]):
        assert torch.equal(model.generate(**inputs, **HOW, num_beams=beams), want)
    assert received == [True] + [padded] * 3
    assert mask_reads
    assert not any(mask_reads)


def test_newly_made_masks_are_read_anew() -> None:
    """A mask that does not continue a known mask counts as unknown, for any shape."""
    model, inputs = decoder("Llama"), text_inputs()
    full = {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}
    want = [model.generate(**batch, **HOW) for batch in (full, inputs, full)]
    with torch.inference_mode(), known_masks([model]):
        got = [model.generate(**batch, **HOW) for batch in (full, inputs, full)]
    assert all(map(torch.equal, got, want))


def test_a_models_own_methods_come_back() -> None:
    model = decoder("Llama")
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = prepare
    with known_masks([model]):
        assert model.prepare_inputs_for_generation is not prepare
    assert vars(model)["prepare_inputs_for_generation"] is prepare
    assert "_update_model_kwargs_for_generation" not in vars(model)
