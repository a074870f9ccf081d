"""Tests that a cast equals `from_pretrained(dtype=…)`: data types, values, and types that modules store."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

from parallelformers_ng import parallelize, plan
from parallelformers_ng.runtime.group import WorkerGroup
from tests.zoo.build import largest_difference, randomise

SIZES = {"vocab_size": 131, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
ENCODER_DECODER = {
    "vocab_size": 131, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
}  # fmt: skip
IDS = torch.arange(3, 10)[None]


def openai_gpt() -> tf.PreTrainedModel:
    """Return a model that masks by a float buffer which no checkpoint holds."""
    return tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(vocab_size=131, n_embd=32, n_layer=2, n_head=4, n_positions=32))


def m2m_100() -> tf.PreTrainedModel:
    """Return a model that adds positions from a buffer of default type which no checkpoint holds."""
    return tf.M2M100ForConditionalGeneration(tf.M2M100Config(**ENCODER_DECODER))


def t5() -> tf.PreTrainedModel:
    """Return a model that keeps `wo` in fp32 if the rest is fp16, but not if it is bf16."""
    return tf.T5ForConditionalGeneration(
        tf.T5Config(vocab_size=131, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def llama() -> tf.PreTrainedModel:
    """Return a model that always keeps its rotary frequencies in fp32."""
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, intermediate_size=48, num_key_value_heads=2))


def deepseek() -> tf.PreTrainedModel:
    """Return a model that keeps a router's bias, a buffer of its checkpoints, in fp32."""
    return tf.DeepseekV3ForCausalLM(
        tf.DeepseekV3Config(
            **SIZES, intermediate_size=48, moe_intermediate_size=16, n_routed_experts=4, n_group=2, topk_group=1,
            num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8,
            qk_nope_head_dim=8, v_head_dim=8, num_key_value_heads=4,
        )
    )  # fmt: skip


def deberta() -> tf.PreTrainedModel:
    """Return a model that makes two parameters fp32 by name."""
    return tf.DebertaModel(tf.DebertaConfig(**SIZES, intermediate_size=48))


FAMILIES = [openai_gpt, m2m_100, t5, llama, deepseek, deberta]


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def saved(make: Callable[[], tf.PreTrainedModel], directory: Path) -> tf.PreTrainedModel:
    model = randomise(make()).eval()
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_ranks_hold_the_types_that_from_pretrained_gives(
    make: Callable[[], tf.PreTrainedModel], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = saved(make, tmp_path)
    want = type(model).from_pretrained(tmp_path, dtype=dtype)
    shard_plan = plan(model, dtype=dtype)
    assert {n: t.dtype for n, t in shard_plan.tensors.items()} == {n: t.dtype for n, t in tensors(want).items()}


@pytest.mark.parametrize("make", [openai_gpt, m2m_100, t5, llama], ids=lambda make: make.__name__)
def test_cast_model_equals_from_pretrained(
    make: Callable[[], tf.PreTrainedModel], groups: Callable[[int], WorkerGroup], tmp_path: Path
) -> None:
    model = saved(make, tmp_path)
    want = type(model).from_pretrained(tmp_path, dtype=torch.float16)
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :4]} if model.config.is_encoder_decoder else {})
    parallelize(model, workers=groups(2), fp16=True)
    got = model(**inputs).logits
    assert got.dtype == torch.float16
    with torch.no_grad():
        assert largest_difference(got.float(), want(**inputs).logits.float()) < 0.02
    assert model.config.dtype == want.config.dtype == torch.float16
    model.deparallelize()
    assert all(torch.equal(tensor, tensors(want)[name]) for name, tensor in tensors(model).items())


def test_weights_of_a_model_on_meta_are_cast(groups: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    want = saved(m2m_100, tmp_path)
    with torch.device("meta"):
        model = type(want)(copy.deepcopy(want.config)).eval()
    parallelize(model, workers=groups(2), weights=tmp_path, fp16=True)
    assert model(input_ids=IDS, decoder_input_ids=IDS).logits.dtype == torch.float16
    assert {tensor.dtype for tensor in tensors(model).values()} == {torch.float16}
    model.deparallelize()


def test_types_noted_in_modules_are_cast(groups: Callable[[int], WorkerGroup], tmp_path: Path) -> None:
    """PaliGemma stores its text model's data type when the model is built."""
    text = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
    vision = {**SIZES, "intermediate_size": 48, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    config = tf.PaliGemmaConfig(text_config={"model_type": "gemma", **text}, vision_config=vision, image_token_index=5)
    model = tf.PaliGemmaForConditionalGeneration(config).eval()
    before = plan(model).settings
    settings = plan(model, dtype="bfloat16").settings
    assert not before
    assert settings["model.text_config_dtype"] == settings["config.text_config.dtype"] == torch.bfloat16
    parallelize(model, workers=groups(2), dtype="bfloat16")
    assert model.model.text_config_dtype == model.config.text_config.dtype == torch.bfloat16
    model.deparallelize()


class Scaled(nn.Linear):
    """A user's own layer, with a buffer that is in checkpoints and a buffer that is not."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("table", torch.ones(width), persistent=False)


def test_own_modules_are_cast_like_their_checkpoints() -> None:
    model = llama()
    model.model.layers[0].mlp.act_fn = nn.Sequential(nn.SiLU(), Scaled(48))
    shard_plan = plan(model, dtype=torch.float16)
    types = {name.rpartition(".")[2]: t.dtype for name, t in shard_plan.tensors.items() if "act_fn" in name}
    assert types == {"weight": torch.float16, "bias": torch.float16, "scale": torch.float16, "table": torch.float32}


class Told(tf.LlamaForCausalLM):
    """A model that cannot be built from its configuration alone."""

    def __init__(self, config: tf.LlamaConfig, answer: int) -> None:
        super().__init__(config)


def test_a_class_that_cannot_be_built_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "parallelformers_ng"):
        shard_plan = plan(Told(llama().config, answer=42), dtype=torch.float16)
    assert "Told cannot be built from its configuration alone" in caplog.text
    assert shard_plan.tensors["lm_head.weight"].dtype == torch.float16
    assert shard_plan.tensors["model.rotary_emb.inv_freq"].dtype == torch.float32
