from parallelformers_ng.policies.deepseek_v2 import LATENT_ATTENTION
from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Experts, Policy, moved


class LongcatFlashPolicy(Policy):
    """Two attentions and two MLPs a layer, and experts beside them; some return their input."""

    block = "LongcatFlashDecoderLayer"
    plan = {**moved(MLP, "mlp", "mlps.*"), "mlp.experts": Experts()}


class LongcatFlashAttentionPolicy(Policy):
    """DeepSeek V2's latent attention."""

    block = "LongcatFlashMLA"
    plan = moved(LATENT_ATTENTION, "self_attn", "")
    optional = ("q_proj",)
