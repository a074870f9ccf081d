"""Tests that models with trained weights generate the same text sharded and whole."""

from __future__ import annotations

import pytest
import torch

from parallelformers_ng import parallelize
from tests.helpers.real_weights import minilm, smollm2
from tests.zoo.build import largest_difference

PROMPTS = ["The capital of France is", "def fibonacci(n):", "In the year 1492", "Water boils at"]


@pytest.mark.slow
def test_a_trained_decoder_says_the_same(groups) -> None:
    model, tokenizer = smollm2()
    inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    want = [model.generate(**each, **options) for each in inputs]
    with torch.no_grad():
        logits = model(**inputs[0]).logits
    with parallelize(model, workers=groups(2), progress=False) as parallel:
        assert largest_difference(parallel(**inputs[0]).logits, logits) <= 1e-4
        assert all(
            torch.equal(parallel.generate(**each, **options), tokens) for each, tokens in zip(inputs, want, strict=True)
        )
    assert "Paris" in tokenizer.decode(want[0][0])


def test_a_trained_encoder_embeds_the_same(groups) -> None:
    model, tokenizer = minilm()
    inputs = tokenizer(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        want = model(**inputs).last_hidden_state
    with parallelize(model, workers=groups(2), progress=False) as parallel:
        assert largest_difference(parallel(**inputs).last_hidden_state, want) <= 1e-4
