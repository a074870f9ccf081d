"""The tiny models of the written policies: family → function that builds one and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build

VOCABULARY = 131  # a prime: it divides by no world size


@dataclass(frozen=True)
class Case:
    """One tiny model.

    Attributes:
        name: for test ids.
        make: builds the model.
        inputs: builds the keyword arguments of its forward.
        generates: whether `generate` is part of the check.
    """

    name: str
    make: Callable[[], PreTrainedModel]
    inputs: Callable[[], dict[str, Any]]
    generates: bool = False


def token_ids(rows: int = 2, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def text_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    return {"input_ids": token_ids(), "attention_mask": mask}


def seq2seq_inputs() -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    return {"input_ids": token_ids(), "attention_mask": mask, "decoder_input_ids": token_ids(length=4, seed=2)}


def image_inputs(size: int = 16) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))}


def gpt2(heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=8 * heads, n_layer=2, n_head=heads,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **options,
    )  # fmt: skip
    return build(tf.GPT2LMHeadModel, config)


def bert(heads: int = 6) -> PreTrainedModel:
    config = tf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=74, max_position_embeddings=64,
    )  # fmt: skip
    return build(tf.BertForMaskedLM, config)


def t5(heads: int = 6, gated: bool = False, tied: bool = True) -> PreTrainedModel:
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=40, d_kv=8, d_ff=74, num_layers=2, num_heads=heads,
        feed_forward_proj="gated-gelu" if gated else "relu", tie_word_embeddings=tied,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return build(tf.T5ForConditionalGeneration, config)


def vit(heads: int = 6) -> PreTrainedModel:
    config = tf.ViTConfig(
        hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=74,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return build(tf.ViTForImageClassification, config)


def decoder(
    family: str, heads: int = 6, key_heads: int = 3, tied: bool = False, width: int = 74, **options: Any
) -> PreTrainedModel:
    """A Llama-shaped decoder of `family` ("Llama", "Mistral", …)."""
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=width, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **options,
    )  # fmt: skip
    return build(getattr(tf, f"{family}ForCausalLM"), config)


CASES = [
    Case("gpt2", gpt2, text_inputs, generates=True),
    Case("bert", bert, text_inputs),
    Case("t5", t5, seq2seq_inputs, generates=True),
    Case("t5-gated-untied", lambda: t5(gated=True, tied=False), seq2seq_inputs, generates=True),
    Case("vit", vit, image_inputs),
    Case("llama", lambda: decoder("Llama"), text_inputs, generates=True),
    Case(
        "llama-tied-biased",
        lambda: decoder("Llama", tied=True, attention_bias=True, mlp_bias=True),
        text_inputs,
        generates=True,
    ),
    Case("llama-8q-2kv", lambda: decoder("Llama", heads=8, key_heads=2), text_inputs, generates=True),
    Case("mistral", lambda: decoder("Mistral", sliding_window=4), text_inputs, generates=True),
    Case("qwen3", lambda: decoder("Qwen3"), text_inputs, generates=True),
    Case(
        "mixtral",
        lambda: decoder("Mixtral", width=80, num_local_experts=4, num_experts_per_tok=2),
        text_inputs,
        generates=True,
    ),
]
