from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Policy, Reduce, Row, Slice, moved

LATENT_ATTENTION = {
    "self_attn": Heads("num_heads"),
    "self_attn.q_proj": Column(),
    "self_attn.q_b_proj": Column(),
    "self_attn.kv_b_proj": Column(),
    "self_attn.o_proj": Row(),
}


class DeepseekV2Policy(Policy):
    """A block of latent attention (arXiv:2405.04434): q, k and v of all heads come from narrow latents, which every
    rank computes.

    The first layers have a plain MLP; all later layers have experts. DeepSeek V3.2 and GLM 5 add an indexer, which
    every rank computes whole, so that all ranks attend to the same keys.
    """

    block = (
        "DeepseekV2DecoderLayer", "DeepseekV3DecoderLayer", "DeepseekV32DecoderLayer", "Glm4MoeLiteDecoderLayer",
        "GlmMoeDsaDecoderLayer", "Mistral4DecoderLayer",
    )  # fmt: skip
    plan = {**LATENT_ATTENTION, **MLP}
    optional = ("self_attn.q_proj", "self_attn.q_b_proj", "mlp")


class DeepseekV2MoEPolicy(Policy):
    """Routed experts and shared experts; the ranks sum the outputs of all experts in one all-reduce."""

    block = (
        "DeepseekV2Moe", "DeepseekOcr2TextMoe", "DeepseekV3MoE", "DeepseekV32MoE", "Glm4MoeMoE", "Glm4MoeLiteMoE",
        "GlmMoeDsaMoE", "Glm4vMoeTextMoE", "KimiLinearMoE", "Mistral4MoE", "UnlimitedOcrTextMoe",
    )  # fmt: skip
    plan = {
        "": Reduce(),
        "experts": Experts(reduce=False),
        "shared_experts.gate_proj": Column(),
        "shared_experts.up_proj": Column(),
        "shared_experts.down_proj": Row(reduce=False),
    }


class Ernie45MoEPolicy(Policy):
    """DeepSeek's experts. Some configurations have no shared experts."""

    block = "Ernie4_5_MoeSparseMoeBlock"
    plan = DeepseekV2MoEPolicy.plan
    optional = ("shared_experts",)


class HunYuanMoEPolicy(Policy):
    """Routed experts, and an MLP through which all tokens go; the ranks sum both outputs in one all-reduce."""

    block = "HunYuanMoEV1Moe"
    plan = moved(DeepseekV2MoEPolicy.plan, "shared_experts", "shared_mlp")


class KimiLinearPolicy(Policy):
    """A layer with latent attention in every fourth layer, and delta attention in all other layers."""

    block = "KimiLinearDecoderLayer"
    plan = MLP
    optional = ("mlp",)


class KimiLinearAttentionPolicy(Policy):
    """DeepSeek V2's attention without rotary positions."""

    block = "KimiLinearAttention"
    plan = moved(LATENT_ATTENTION, "self_attn", "")
    optional = ("q_proj", "q_b_proj")


class KimiDeltaAttentionPolicy(Policy):
    """Attention by the gated delta rule (arXiv:2510.26692): each head has its own state, and gates come from narrow
    latents."""

    block = "KimiLinearDeltaAttention"
    plan = {
        "": Heads("num_heads", scaled=("qkv_dim",)),
        "q_proj": Column(),
        "k_proj": Column(),
        "v_proj": Column(),
        "conv1d": Column(fused=3),
        "forget_gate.f_b_proj": Column(),
        "forget_gate.dt_bias": Slice(0),
        "forget_gate.A_log": Slice(2),
        "b_proj": Column(),
        "g_b_proj": Column(),
        "o_proj": Row(),
    }


class LongcatFlashPolicy(Policy):
    """A layer with two attentions, two MLPs, and experts beside them. Some experts return their input."""

    block = "LongcatFlashDecoderLayer"
    plan = {**moved(MLP, "mlp", "mlps.*"), "mlp.experts": Experts()}


class LongcatFlashAttentionPolicy(Policy):
    """DeepSeek V2's latent attention in LongCat-Flash."""

    block = "LongcatFlashMLA"
    plan = moved(LATENT_ATTENTION, "self_attn", "")
    optional = ("q_proj",)
