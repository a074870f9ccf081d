from parallelformers_ng.policies.deepseek_v2 import LATENT_ATTENTION
from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Experts, Policy, moved


class LongcatFlashPolicy(Policy):
    """A layer with two attentions, two MLPs, and experts beside them. Some experts return their input."""

    block = "LongcatFlashDecoderLayer"
    plan = {**moved(MLP, "mlp", "mlps.*"), "mlp.experts": Experts()}


class LongcatFlashAttentionPolicy(Policy):
    """DeepSeek V2's latent attention in LongCat-Flash."""

    block = "LongcatFlashMLA"
    plan = moved(LATENT_ATTENTION, "self_attn", "")
    optional = ("q_proj",)
