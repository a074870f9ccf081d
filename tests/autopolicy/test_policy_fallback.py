"""Tests that blocks get an inferred policy if their written policy does not fit, and that a quantization flag changes
nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import transformers as tf

from parallelformers_ng import Column, Policy, parallelize, plan
from parallelformers_ng.cli.coverage import verify_model
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.errors import PolicyError, UnsupportedModelError
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.inject import cut
from tests.zoo.build import build, largest_difference

IDS = torch.arange(3, 12)[None]
SIZES = {
    "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 72,
    "max_position_embeddings": 32,
}  # fmt: skip


def squeezebert() -> tf.PreTrainedModel:
    """Return a model with grouped convolutions, for which the written policy would sum over channels."""
    groups = {"q_groups": 2, "k_groups": 2, "v_groups": 2, "post_attention_groups": 4, "output_groups": 4}
    config = tf.SqueezeBertConfig(**SIZES, **groups, embedding_size=48)
    return build(tf.SqueezeBertForMaskedLM, config, attention="eager")


def ibert() -> tf.PreTrainedModel:
    """Return a model that scales weights by the maximum of the whole weight, which no rank has."""
    return build(tf.IBertModel, tf.IBertConfig(**SIZES, quant_mode=True), attention="eager")


def bloom() -> tf.PreTrainedModel:
    """Return a model that multiplies slices of its weights one after another."""
    config = tf.BloomConfig(vocab_size=131, hidden_size=48, n_layer=2, n_head=6, slow_but_exact=True)
    return build(tf.BloomForCausalLM, config, attention="eager")


@pytest.mark.parametrize(
    ("make", "policy"), [(squeezebert, "SqueezeBertPolicy"), (ibert, "IBertPolicy"), (bloom, "BloomPolicy")]
)
def test_policy_misfit_is_inferred_instead(
    make: Callable[[], tf.PreTrainedModel], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    with torch.no_grad():
        want = model(IDS)[0]
    with caplog.at_level(logging.INFO, "parallelformers_ng"):
        shard_plan = plan(model)
    assert policy not in shard_plan.policy.split(", ")
    assert f"{policy}: " in caplog.text

    def run(communicator):
        with torch.no_grad():
            return cut(model, shard_plan, communicator.rank, communicator)(IDS)[0]

    assert largest_difference(run_ranks(2, run)[0], want) <= 1e-4
    proof = verify_model(model)
    assert proof.equal
    assert proof.tried[0].startswith(policy)


def test_custom_policy_misfit_raises() -> None:
    class Mine(Policy):
        block = "SqueezeBertModule"
        plan = {"post_attention.conv1d": Column("query")}

    with pytest.raises(PolicyError, match=r"Mine: rule 'post_attention.conv1d' on "):
        plan(squeezebert(), custom_policies=Mine)


class Quantizer:
    """The quantizer object that transformers leaves on a model read from a GGUF file."""

    def remove_quantization_config(self, model: tf.PreTrainedModel) -> None:
        del model.hf_quantizer
        model.is_quantized = False


def marked() -> tf.PreTrainedModel:
    model = build(tf.GPT2LMHeadModel, tf.GPT2Config(vocab_size=131, n_embd=48, n_layer=2, n_head=6, n_positions=32))
    model.is_quantized, model.hf_quantizer = True, Quantizer()
    return model


def test_unpacked_model_is_not_quantized(groups: Callable[[int], WorkerGroup]) -> None:
    model = marked()
    with torch.no_grad():
        want = model(IDS).logits
    parallelize(model, workers=groups(2))
    assert largest_difference(model(IDS).logits, want) <= 1e-4
    model.deparallelize()
    assert not model.is_quantized


@pytest.mark.parametrize("packed", ["integers", "float8", "another shape", "a tensor of its own kind"])
def test_packed_weights_are_refused(packed: str) -> None:
    class Packed(torch.Tensor):
        pass

    model = marked()
    layer = model.transformer.h[0].mlp.c_fc
    whole = layer.weight.data
    weights = {
        "integers": whole.to(torch.int8),
        "float8": whole.to(torch.float8_e4m3fn),
        "another shape": whole[: whole.shape[0] // 2],
        "a tensor of its own kind": whole.as_subclass(Packed),
    }
    layer.weight = torch.nn.Parameter(weights[packed], requires_grad=False)
    with pytest.raises(UnsupportedModelError, match="is quantized"):
        plan(model)
