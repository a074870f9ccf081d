"""Makes tiny newer text decoders: latent attention, delta nets, routed experts with shared experts."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, text_inputs
from tests.zoo.decoders import EXPERTS, LAYERS, MIXTURE, SPECIAL_IDS, decoder

LATENT = {
    "q_lora_rank": 20, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "moe_intermediate_size": 40, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
INDEXER = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 3}
DELTA_NET = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
DELTA_MIXTURE = {**DELTA_NET, **MIXTURE}


def latent(family: str, heads: int = 6, dense: int = 1, **options: Any) -> PreTrainedModel:
    """Return a decoder with latent attention; `dense` layers have no experts."""
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=74, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=heads, max_position_embeddings=64, **SPECIAL_IDS,
        **{"first_k_dense_replace": dense, **LATENT, **options},
    )  # fmt: skip
    return build(getattr(tf, f"{family}ForCausalLM"), config, attention=options.pop("attention", "sdpa"))


def mpt(heads: int = 6) -> PreTrainedModel:
    config = tf.MptConfig(
        vocab_size=VOCABULARY, d_model=8 * heads, n_heads=heads, n_layers=2, max_seq_len=32, **SPECIAL_IDS
    )
    return build(tf.MptForCausalLM, config, attention="eager")


def dbrx() -> PreTrainedModel:
    config = tf.DbrxConfig(
        vocab_size=VOCABULARY, d_model=48, n_heads=6, n_layers=2, max_seq_len=32, **SPECIAL_IDS,
        attn_config={"kv_n_heads": 3, "clip_qkv": 2.0, "rope_theta": 10000.0},
        ffn_config={"hidden_size": 48, "ffn_hidden_size": 40, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    return build(tf.DbrxForCausalLM, config)


def kimi_linear() -> PreTrainedModel:
    return latent(
        "KimiLinear", q_lora_rank=None, layer_types=["linear_attention", "full_attention"], linear_num_heads=6,
        linear_head_dim=8, num_local_experts=4, mlp_layer_types=["dense", "sparse"],
    )  # fmt: skip


def gemma(family: str, **options: Any) -> PreTrainedModel:
    """Return a model whose last two layers read the keys and values of the first two."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    return decoder(
        family, tied=True, layers=4, layer_types=kinds, sliding_window=3, num_kv_shared_layers=2,
        hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, **options,
    )  # fmt: skip


GEMMA3N = {"activation_sparsity_pattern": [0.6, 0.3, 0.0, 0.0], "laurel_rank": 4, "altup_num_inputs": 3}
GEMMA4 = {
    "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "enable_moe_block": True,
    "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40,
}  # fmt: skip
LLAMA4 = {
    "intermediate_size_mlp": 60, "num_local_experts": 4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
    "attention_chunk_size": 4, "no_rope_layer_interval": 2,
}  # fmt: skip

CASES = [
    Case(name, make, text_inputs, generates=True)
    for name, make in {
        "mpt": mpt,
        "granite": lambda: decoder("Granite", attention_multiplier=0.3, residual_multiplier=0.7),
        "granitemoe": lambda: decoder("GraniteMoe", width=80, **EXPERTS),
        "granitemoeshared": lambda: decoder("GraniteMoeShared", width=80, shared_intermediate_size=44, **EXPERTS),
        "nemotron": lambda: decoder("Nemotron"),
        "ministral": lambda: decoder("Ministral", sliding_window=3, layer_types=LAYERS),
        "ministral3": lambda: decoder("Ministral3"),
        "smollm3": lambda: decoder("SmolLM3", no_rope_layer_interval=2),
        "olmoe": lambda: decoder("Olmoe", width=80, num_experts=4, num_experts_per_tok=2),
        "flex-olmo": lambda: decoder("FlexOlmo", width=80, num_experts=4, num_experts_per_tok=2),
        "phimoe": lambda: decoder("Phimoe", width=80, attention_bias=True, lm_head_bias=True, **EXPERTS),
        "arcee": lambda: decoder("Arcee"),
        "apertus": lambda: decoder("Apertus"),
        "helium": lambda: decoder("Helium"),
        "exaone4": lambda: decoder("Exaone4", sliding_window=3, layer_types=LAYERS),
        "seed-oss": lambda: decoder("SeedOss"),
        "ernie4-5": lambda: decoder("Ernie4_5"),
        "ernie4-5-moe": lambda: decoder(
            "Ernie4_5_Moe",
            moe_num_shared_experts=1,
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=40,
            moe_layer_start_index=1,
            moe_layer_end_index=1,
        ),
        "hunyuan-moe": lambda: decoder("HunYuanMoEV1", width=80, num_experts=4, moe_topk=2),
        "lfm2": lambda: decoder("Lfm2", layer_types=["conv", "full_attention"], block_ff_dim=74, conv_bias=True),
        "lfm2-moe": lambda: decoder(
            "Lfm2Moe",
            layer_types=["conv", "full_attention"],
            num_dense_layers=1,
            moe_intermediate_size=40,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        "hunyuan": lambda: decoder("HunYuanDenseV1"),
        "glm": lambda: decoder("Glm", attention_bias=True),
        "glm4": lambda: decoder("Glm4", attention_bias=True),
        "glm4-moe": lambda: decoder(
            "Glm4Moe",
            use_qk_norm=True,
            first_k_dense_replace=1,
            **{name: value for name, value in LATENT.items() if "lora" not in name and "head" not in name},
        ),
        "glm4-moe-lite": lambda: latent("Glm4MoeLite", mlp_layer_types=["dense", "sparse"]),
        "glm-moe-dsa": lambda: latent("GlmMoeDsa", mlp_layer_types=["dense", "sparse"], **INDEXER),
        "deepseek-v2": lambda: latent("DeepseekV2"),
        "deepseek-v2-lite": lambda: latent("DeepseekV2", heads=4, q_lora_rank=None),
        "deepseek-v3": lambda: latent("DeepseekV3"),
        "deepseek-v32": lambda: latent("DeepseekV32", mlp_layer_types=["dense", "sparse"], **INDEXER),
        "mistral4": lambda: latent("Mistral4"),
        "kimi-linear": kimi_linear,
        "gpt-oss": lambda: decoder(
            "GptOss", width=80, attention="eager", sliding_window=3, layer_types=LAYERS, **EXPERTS
        ),
        "dbrx": dbrx,
        "minimax": lambda: decoder("MiniMax", width=80, block_size=4, layer_types=DELTA_NET["layer_types"], **EXPERTS),
        "minimax-m2": lambda: decoder("MiniMaxM2", width=80, **EXPERTS),
        "llama4": lambda: decoder("Llama4Text", width=40, **LLAMA4),
        "qwen3-next": lambda: decoder("Qwen3Next", **DELTA_MIXTURE),
        "qwen3-next-mlp-layer": lambda: decoder("Qwen3Next", mlp_only_layers=[0], **DELTA_MIXTURE),
        "qwen3-5": lambda: decoder("Qwen3_5Text", **DELTA_NET),
        "qwen3-5-moe": lambda: decoder("Qwen3_5MoeText", **DELTA_MIXTURE),
        "gemma3n": lambda: gemma("Gemma3nText", **GEMMA3N),
        "gemma4": lambda: gemma("Gemma4Text", **GEMMA4),
    }.items()
]
