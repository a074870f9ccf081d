"""Decoders over text."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, text_inputs

SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gpt2(heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=8 * heads, n_layer=2, n_head=heads, **SPECIAL_IDS, **options
    )
    return build(tf.GPT2LMHeadModel, config)


def gpt_neo(heads: int = 6) -> PreTrainedModel:
    """One layer attends to everything, the next to a window shorter than the inputs."""
    config = tf.GPTNeoConfig(
        vocab_size=VOCABULARY, max_position_embeddings=32, hidden_size=8 * heads, num_layers=2, num_heads=heads,
        attention_types=[[["global", "local"], 1]], window_size=3, intermediate_size=74, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.GPTNeoForCausalLM, config, attention="eager")


def gptj(heads: int = 6) -> PreTrainedModel:
    config = tf.GPTJConfig(
        vocab_size=VOCABULARY, n_positions=32, n_embd=8 * heads, n_layer=2, n_head=heads, n_inner=74,
        rotary_dim=4, tie_word_embeddings=False, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.GPTJForCausalLM, config, attention="eager")


def opt(heads: int = 6, embedding: int = 48, **options: Any) -> PreTrainedModel:
    config = tf.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads, ffn_dim=74,
        max_position_embeddings=32, word_embed_proj_dim=embedding, **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(tf.OPTForCausalLM, config)


def decoder(family: str, heads: int = 6, key_heads: int = 3, tied: bool = False, width: int = 74, **options: Any) -> PreTrainedModel:
    """A Llama-shaped decoder of `family` ("Llama", "Mistral", …)."""
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=width, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(getattr(tf, f"{family}ForCausalLM"), config)


CASES = [
    Case("gpt2", gpt2, text_inputs, generates=True),
    Case("gpt-neo", gpt_neo, text_inputs, generates=True),
    Case("gptj", gptj, text_inputs, generates=True),
    Case("opt", opt, text_inputs, generates=True),
    Case("opt-350m", lambda: opt(embedding=20, do_layer_norm_before=False), text_inputs, generates=True),
    Case("opt-unbiased-untied", lambda: opt(enable_bias=False, tie_word_embeddings=False), text_inputs, generates=True),
    Case("llama", lambda: decoder("Llama"), text_inputs, generates=True),
    Case("llama-tied-biased", lambda: decoder("Llama", tied=True, attention_bias=True, mlp_bias=True), text_inputs, True),
    Case("llama-8q-2kv", lambda: decoder("Llama", heads=8, key_heads=2), text_inputs, generates=True),
    Case("mistral", lambda: decoder("Mistral", sliding_window=4), text_inputs, generates=True),
    Case("qwen3", lambda: decoder("Qwen3"), text_inputs, generates=True),
    Case("mixtral", lambda: decoder("Mixtral", width=80, num_local_experts=4, num_experts_per_tok=2), text_inputs, True),
]
