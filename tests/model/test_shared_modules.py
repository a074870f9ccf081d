"""Tests that modules shared by several models still work in models that are not parallelized."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import parallelize
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.build import build, largest_difference

IDS = torch.arange(3, 10)[None]
SMALL = {"vocab_size": 131, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def openai_gpt() -> tf.PreTrainedModel:
    """Return a model that reads its activation from a table in the modelling file."""
    return build(tf.OpenAIGPTLMHeadModel, tf.OpenAIGPTConfig(**SMALL), attention="eager")


def xlm() -> tf.PreTrainedModel:
    """Return a model with an activation object of its modelling file."""
    config = tf.XLMConfig(
        vocab_size=131, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=32, gelu_activation=True
    )
    return build(tf.XLMWithLMHeadModel, config, attention="eager")


def image_gpt() -> tf.PreTrainedModel:
    return build(tf.ImageGPTForCausalImageModeling, tf.ImageGPTConfig(**SMALL), attention="eager")


@pytest.mark.parametrize("make", [openai_gpt, xlm, image_gpt], ids=lambda make: make.__name__)
def test_plain_models_of_a_family_go_on(
    make: Callable[[], tf.PreTrainedModel], groups: Callable[[int], WorkerGroup]
) -> None:
    plain, model = make(), make()
    with torch.no_grad():
        want = plain(IDS).logits
        parallelize(model, workers=groups(2))
        assert torch.equal(plain(IDS).logits, want)
        assert largest_difference(model(IDS).logits, want) <= 1e-4
        assert torch.equal(make()(IDS).logits, want)  # a model made in the meantime
        model.deparallelize()
        assert torch.equal(plain(IDS).logits, want)
        assert torch.equal(model(IDS).logits, want)


def test_parallelized_models_may_share_weightless_modules(groups: Callable[[int], WorkerGroup]) -> None:
    shared = nn.Sequential(nn.GELU(), nn.Identity())
    models = [build(tf.GPT2LMHeadModel, tf.GPT2Config(**SMALL)) for _ in range(2)]
    for model in models:
        for block in model.transformer.h:
            block.mlp.act = shared
    with torch.no_grad():
        want = models[0](IDS).logits
    for model in models:
        parallelize(model, workers=groups(2))
    for model in models:  # in the order of their start
        assert largest_difference(model(IDS).logits, want) <= 1e-4
        assert torch.equal(model.transformer.h[0].mlp.act(torch.ones(3)), nn.functional.gelu(torch.ones(3)))
        model.deparallelize()
    with torch.no_grad():
        assert all(torch.equal(model(IDS).logits, want) for model in models)
