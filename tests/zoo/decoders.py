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


def gpt_neox(heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.GPTNeoXConfig(
        vocab_size=VOCABULARY, hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads,
        intermediate_size=74, max_position_embeddings=64, **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(tf.GPTNeoXForCausalLM, config)


def bloom(heads: int = 6) -> PreTrainedModel:
    config = tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=8 * heads, n_layer=2, n_head=heads, **SPECIAL_IDS)
    return build(tf.BloomForCausalLM, config, attention="eager")


def falcon(heads: int = 6, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    config = tf.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads,
        ffn_hidden_size=74, max_position_embeddings=64, **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(tf.FalconForCausalLM, config, attention=attention)


def gpt_bigcode(heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.GPTBigCodeConfig(
        vocab_size=VOCABULARY, n_positions=32, n_embd=8 * heads, n_layer=2, n_head=heads, n_inner=74,
        **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(tf.GPTBigCodeForCausalLM, config)


def decoder(
    family: str,
    heads: int = 6,
    key_heads: int = 3,
    tied: bool = False,
    width: int = 74,
    attention: str = "sdpa",
    **options: Any,
) -> PreTrainedModel:
    """A Llama-shaped decoder of `family` ("Llama", "Mistral", …)."""
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=width, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=key_heads, head_dim=8, max_position_embeddings=64, tie_word_embeddings=tied,
        **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(getattr(tf, f"{family.removesuffix('Text')}ForCausalLM"), config, attention=attention)


MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 44,
}
LAYERS = ["sliding_attention", "full_attention"]
GEMMA3 = {"layer_types": LAYERS, "sliding_window": 3, "query_pre_attn_scalar": 8}

CASES = [
    Case("gpt2", gpt2, text_inputs, generates=True),
    Case("gpt-neo", gpt_neo, text_inputs, generates=True),
    Case("gptj", gptj, text_inputs, generates=True),
    Case("opt", opt, text_inputs, generates=True),
    Case("opt-350m", lambda: opt(embedding=20, do_layer_norm_before=False), text_inputs, generates=True),
    Case("opt-unbiased-untied", lambda: opt(enable_bias=False, tie_word_embeddings=False), text_inputs, generates=True),
    Case("llama", lambda: decoder("Llama"), text_inputs, generates=True),
    Case(
        "llama-tied-biased", lambda: decoder("Llama", tied=True, attention_bias=True, mlp_bias=True), text_inputs, True
    ),
    Case("llama-8q-2kv", lambda: decoder("Llama", heads=8, key_heads=2), text_inputs, generates=True),
    Case("mistral", lambda: decoder("Mistral", sliding_window=4), text_inputs, generates=True),
    Case("qwen3", lambda: decoder("Qwen3"), text_inputs, generates=True),
    Case("gemma", lambda: decoder("Gemma", tied=True), text_inputs, generates=True),
    Case("gemma2", lambda: decoder("Gemma2", tied=True, attention="eager", **GEMMA3), text_inputs, generates=True),
    Case("gemma3", lambda: decoder("Gemma3Text", tied=True, **GEMMA3), text_inputs, generates=True),
    Case("qwen2", lambda: decoder("Qwen2"), text_inputs, generates=True),
    Case("qwen2-tied", lambda: decoder("Qwen2", tied=True, key_heads=1), text_inputs, generates=True),
    Case("qwen2-moe", lambda: decoder("Qwen2Moe", **MIXTURE), text_inputs, generates=True),
    Case(
        "qwen2-moe-mlp-layer", lambda: decoder("Qwen2Moe", mlp_only_layers=[0], **MIXTURE), text_inputs, generates=True
    ),
    Case("qwen3-moe", lambda: decoder("Qwen3Moe", **MIXTURE), text_inputs, generates=True),
    Case("phi3", lambda: decoder("Phi3"), text_inputs, generates=True),
    Case("phi3-8q-2kv", lambda: decoder("Phi3", heads=8, key_heads=2), text_inputs, generates=True),
    Case("phi", lambda: decoder("Phi"), text_inputs, generates=True),
    Case("phi-norms", lambda: decoder("Phi", qk_layernorm=True), text_inputs, generates=True),
    Case("gpt-neox", gpt_neox, text_inputs, generates=True),
    Case("gpt-neox-sequential", lambda: gpt_neox(use_parallel_residual=False), text_inputs, generates=True),
    Case("bloom", bloom, text_inputs, generates=True),
    Case("falcon", falcon, text_inputs, generates=True),
    Case("falcon-per-head", lambda: falcon(multi_query=False, bias=True), text_inputs, generates=True),
    Case("falcon-grouped", lambda: falcon(new_decoder_architecture=True, num_kv_heads=3), text_inputs, generates=True),
    Case("falcon-alibi", lambda: falcon(alibi=True, parallel_attn=False), text_inputs, generates=True),
    Case(
        "falcon-alibi-eager",
        lambda: falcon(alibi=True, multi_query=False, attention="eager"),
        text_inputs,
        generates=True,
    ),
    Case("gpt-bigcode", gpt_bigcode, text_inputs, generates=True),
    Case("gpt-bigcode-per-head", lambda: gpt_bigcode(multi_query=False), text_inputs, generates=True),
    Case("olmo", lambda: decoder("Olmo", clip_qkv=1.0), text_inputs, generates=True),
    Case("olmo2", lambda: decoder("Olmo2"), text_inputs, generates=True),
    Case("olmo3", lambda: decoder("Olmo3", sliding_window=3, layer_types=LAYERS), text_inputs, generates=True),
    Case("stablelm", lambda: decoder("StableLm", use_qkv_bias=True), text_inputs, generates=True),
    Case(
        "stablelm-norms", lambda: decoder("StableLm", qk_layernorm=True, use_parallel_residual=True), text_inputs, True
    ),
    Case("cohere", lambda: decoder("Cohere", tied=True), text_inputs, generates=True),
    Case("cohere-norms", lambda: decoder("Cohere", tied=True, use_qk_norm=True), text_inputs, generates=True),
    Case("cohere2", lambda: decoder("Cohere2", tied=True, sliding_window=3, layer_types=LAYERS), text_inputs, True),
    Case("starcoder2", lambda: decoder("Starcoder2"), text_inputs, generates=True),
    Case(
        "mixtral", lambda: decoder("Mixtral", width=80, num_local_experts=4, num_experts_per_tok=2), text_inputs, True
    ),
]
