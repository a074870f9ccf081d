from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Policy, Reduce, Row, Slice, moved

LATENT_ATTENTION = {
    "self_attn": Heads("num_heads"),
    "self_attn.{q,q_b,kv_b}_proj": Column(),
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
    """Routed experts and, in most models, an MLP through which all tokens go, sometimes gated. The ranks sum all
    outputs in one all-reduce."""

    block = (
        "DeepseekV2Moe", "DeepseekOcr2TextMoe", "DeepseekV3MoE", "DeepseekV32MoE", "Ernie4_5_MoeSparseMoeBlock",
        "Glm4MoeMoE", "Glm4MoeLiteMoE", "GlmMoeDsaMoE", "Glm4vMoeTextMoE", "HunYuanMoEV1Moe", "KimiLinearMoE",
        "Llama4TextMoe", "Mistral4MoE", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock", "UnlimitedOcrTextMoe",
    )  # fmt: skip
    plan = {
        "": Reduce(),
        "experts": Experts(reduce=False),
        "{shared_experts,shared_expert,shared_mlp}.{gate,up}_proj": Column(),
        "{shared_experts,shared_expert,shared_mlp}.down_proj": Row(reduce=False),
    }
    optional = ("shared_experts", "shared_expert", "shared_mlp")


class KimiLinearPolicy(Policy):
    """A layer with latent attention in every fourth layer, and delta attention in all other layers."""

    block = "KimiLinearDecoderLayer"
    plan = MLP
    optional = ("mlp",)


class LatentAttentionPolicy(Policy):
    """DeepSeek V2's latent attention as a block of its own: in Kimi Linear, without rotary positions, and in
    LongCat-Flash."""

    block = ("KimiLinearAttention", "LongcatFlashMLA")
    plan = moved(LATENT_ATTENTION, "self_attn", "")
    optional = ("q_proj", "q_b_proj")


class KimiDeltaAttentionPolicy(Policy):
    """Attention by the gated delta rule (arXiv:2510.26692): each head has its own state, and gates come from narrow
    latents."""

    block = "KimiLinearDeltaAttention"
    plan = {
        "": Heads("num_heads", scaled=("qkv_dim",)),
        "{q,k,v}_proj": Column(),
        "conv1d": Column(fused=3),
        "forget_gate.f_b_proj": Column(),
        "forget_gate.dt_bias": Slice(0),
        "forget_gate.A_log": Slice(2),
        "{b,g_b}_proj": Column(),
        "o_proj": Row(),
    }


class LongcatFlashPolicy(Policy):
    """A layer with two attentions, two MLPs, and experts beside them. Some experts return their input."""

    block = "LongcatFlashDecoderLayer"
    plan = {**moved(MLP, "mlp", "mlps.*"), "mlp.experts": Experts()}
