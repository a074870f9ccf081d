from parallelformers_ng.policies.deepseek_v2 import LATENT_ATTENTION, DeepseekV2Policy
from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice, moved


class KimiLinearPolicy(DeepseekV2Policy):
    """A layer with latent attention in every fourth layer, and delta attention in all other layers."""

    block = "KimiLinearDecoderLayer"
    plan = MLP
    optional = ("mlp",)


class KimiLinearAttentionPolicy(Policy):
    """DeepSeek V2's attention, without positions."""

    block = "KimiLinearAttention"
    plan = moved(LATENT_ATTENTION, "self_attn", "")
    optional = ("q_proj", "q_b_proj")


class KimiDeltaAttentionPolicy(Policy):
    """Attention by the gated delta rule (arXiv:2510.26692): each head has its own state, and gates come from narrow
    latents."""

    block = "KimiLinearDeltaAttention"
    plan = {
        "": Heads("num_heads", scaled=("qkv_dim",)),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), Column()),
        "conv1d": Column(fused=3),
        "forget_gate.f_b_proj": Column(),
        "forget_gate.dt_bias": Slice(0),
        "forget_gate.A_log": Slice(2),
        "b_proj": Column(),
        "g_b_proj": Column(),
        "o_proj": Row(),
    }
