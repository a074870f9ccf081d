"""Makes tiny text decoders with state-space or other recurrent layers, with or without attention layers."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, text_inputs
from tests.zoo.decoders import SPECIAL_IDS

ATTENTION = {"num_attention_heads": 6, "num_key_value_heads": 3}
HYBRID = {
    **ATTENTION, "intermediate_size": 74, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 3,
    "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 4,
}  # fmt: skip


def recurrent(family: str, layers: int = 2, **options: Any) -> PreTrainedModel:
    """Return a decoder of `family` ("Mamba", "Jamba", …) with a hidden size of 48."""
    settings = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": layers, **SPECIAL_IDS, **options}
    cls = getattr(tf, f"{family}ForCausalLM")
    config = getattr(tf, f"{family}Config")(**settings)
    return build(cls, config, attention="sdpa" if cls._supports_sdpa else "eager")


def mamba2(heads: int = 6, groups: int = 3) -> PreTrainedModel:
    return recurrent("Mamba2", num_heads=heads, head_dim=96 // heads, n_groups=groups, state_size=8, chunk_size=4)


def jamba() -> PreTrainedModel:
    return recurrent(
        "Jamba", 4, intermediate_size=80, num_experts=4, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
        expert_layer_period=3, expert_layer_offset=1, use_mamba_kernels=False, **ATTENTION,
    )  # fmt: skip


def nemotron_h() -> PreTrainedModel:
    return recurrent(
        "NemotronH", 4, layers_block_type=["mamba", "attention", "mlp", "moe"], head_dim=8, intermediate_size=74,
        mamba_num_heads=6, mamba_head_dim=16, n_groups=2, ssm_state_size=8, chunk_size=4, n_routed_experts=4,
        moe_intermediate_size=40, moe_shared_expert_intermediate_size=44, **ATTENTION,
    )  # fmt: skip


def zamba2(**options: Any) -> PreTrainedModel:
    """Return a model of three layers in which two shared attention blocks alternate."""
    return recurrent(
        "Zamba2", 5, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid"], num_mem_blocks=2,
        n_mamba_heads=6, mamba_headdim=16, mamba_ngroups=1, mamba_d_state=8, chunk_size=4, intermediate_size=74,
        num_attention_heads=6, adapter_rank=4, use_mem_rope=True, **options,
    )  # fmt: skip


def granite_hybrid(**options: Any) -> PreTrainedModel:
    layers = ["mamba", "attention"]
    return recurrent(
        "GraniteMoeHybrid", layer_types=layers, shared_intermediate_size=44, num_experts_per_tok=2, **(HYBRID | options)
    )


_AT_ODDS = (
    {"falcon-h1-norms": "transformers 5.17 generates other tokens with a cache than without, or raises"}
    if tf.__version__.startswith("5.17.")
    else {}
)

CASES = [
    Case(name, make, text_inputs, generates=True, at_odds=_AT_ODDS.get(name, ""))
    for name, make in {
        "mamba": lambda: recurrent("Mamba", state_size=8),
        "falcon-mamba": lambda: recurrent("FalconMamba", state_size=8),
        "mamba2": mamba2,
        "mamba2-one-group": lambda: mamba2(groups=1),
        "mamba2-two-groups": lambda: mamba2(heads=4, groups=2),
        "bamba": lambda: recurrent("Bamba", attn_layer_indices=[1], **HYBRID),
        "falcon-h1": lambda: recurrent("FalconH1", mamba_d_ssm=96, ssm_multipliers=[0.5, 2.0, 1.5, 0.7, 1.2], **HYBRID),
        "falcon-h1-norms": lambda: recurrent("FalconH1", mamba_d_ssm=96, mamba_rms_norm=True, **HYBRID),
        "jamba": jamba,
        "nemotron-h": nemotron_h,
        "zamba2": lambda: zamba2(use_shared_attention_adapter=True),
        "zamba2-grouped": lambda: zamba2(num_key_value_heads=3),
        "granitemoehybrid": lambda: granite_hybrid(num_local_experts=4, intermediate_size=80),
        "granitemoehybrid-dense": lambda: granite_hybrid(num_local_experts=0),
        "rwkv": lambda: recurrent("Rwkv", attention_hidden_size=48, intermediate_size=74, context_length=32),
        "recurrent-gemma": lambda: recurrent(
            "RecurrentGemma",
            3,
            num_attention_heads=6,
            num_key_value_heads=3,
            lru_width=48,
            intermediate_size=148,
            attention_window_size=4,
        ),
    }.items()
]
