"""Makes tiny text decoders."""

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
    """Return a model with one layer of full attention, and one with a window shorter than the inputs."""
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


def bloom(heads: int = 6, **options: Any) -> PreTrainedModel:
    config = tf.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=8 * heads, n_layer=2, n_head=heads, **SPECIAL_IDS, **options
    )
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
    layers: int = 2,
    attention: str = "sdpa",
    **options: Any,
) -> PreTrainedModel:
    """Return a Llama-shaped decoder of `family` ("Llama", "Mistral", …)."""
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=tied, **SPECIAL_IDS, **options,
    )  # fmt: skip
    return build(getattr(tf, f"{family.removesuffix('Text')}ForCausalLM"), config, attention=attention)


MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 44,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LAYERS = ["sliding_attention", "full_attention"]
GEMMA3 = {"layer_types": LAYERS, "sliding_window": 3, "query_pre_attn_scalar": 8}

CASES = [
    Case(name, make, text_inputs, generates=True)
    for name, make in {
        "gpt2": gpt2,
        "gpt-neo": gpt_neo,
        "gptj": gptj,
        "opt": opt,
        "opt-350m": lambda: opt(embedding=20, do_layer_norm_before=False),
        "opt-unbiased-untied": lambda: opt(enable_bias=False, tie_word_embeddings=False),
        "llama": lambda: decoder("Llama"),
        "llama-tied-biased": lambda: decoder("Llama", tied=True, attention_bias=True, mlp_bias=True),
        "llama-8q-2kv": lambda: decoder("Llama", heads=8, key_heads=2),
        "mistral": lambda: decoder("Mistral", sliding_window=4),
        "qwen3": lambda: decoder("Qwen3"),
        "gemma": lambda: decoder("Gemma", tied=True),
        "gemma2": lambda: decoder("Gemma2", tied=True, attention="eager", **GEMMA3),
        "gemma3": lambda: decoder("Gemma3Text", tied=True, **GEMMA3),
        "qwen2": lambda: decoder("Qwen2"),
        "qwen2-tied": lambda: decoder("Qwen2", tied=True, key_heads=1),
        "qwen2-moe": lambda: decoder("Qwen2Moe", **MIXTURE),
        "qwen2-moe-mlp-layer": lambda: decoder("Qwen2Moe", mlp_only_layers=[0], **MIXTURE),
        "qwen3-moe": lambda: decoder("Qwen3Moe", **MIXTURE),
        "phi3": lambda: decoder("Phi3"),
        "phi3-8q-2kv": lambda: decoder("Phi3", heads=8, key_heads=2),
        "phi": lambda: decoder("Phi"),
        "phi-norms": lambda: decoder("Phi", qk_layernorm=True),
        "gpt-neox": gpt_neox,
        "gpt-neox-sequential": lambda: gpt_neox(use_parallel_residual=False),
        "bloom": bloom,
        "falcon": falcon,
        "falcon-per-head": lambda: falcon(multi_query=False, bias=True),
        "falcon-grouped": lambda: falcon(new_decoder_architecture=True, num_kv_heads=3),
        "falcon-alibi": lambda: falcon(alibi=True, parallel_attn=False),
        "falcon-alibi-eager": lambda: falcon(alibi=True, multi_query=False, attention="eager"),
        "gpt-bigcode": gpt_bigcode,
        "gpt-bigcode-per-head": lambda: gpt_bigcode(multi_query=False),
        "olmo": lambda: decoder("Olmo", clip_qkv=1.0),
        "olmo2": lambda: decoder("Olmo2"),
        "olmo3": lambda: decoder("Olmo3", sliding_window=3, layer_types=LAYERS),
        "stablelm": lambda: decoder("StableLm", use_qkv_bias=True),
        "stablelm-norms": lambda: decoder("StableLm", qk_layernorm=True, use_parallel_residual=True),
        "cohere": lambda: decoder("Cohere", tied=True),
        "cohere-norms": lambda: decoder("Cohere", tied=True, use_qk_norm=True),
        "cohere2": lambda: decoder("Cohere2", tied=True, sliding_window=3, layer_types=LAYERS),
        "starcoder2": lambda: decoder("Starcoder2"),
        "mixtral": lambda: decoder("Mixtral", width=80, **EXPERTS),
    }.items()
]
