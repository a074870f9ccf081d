from typing import ClassVar

from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Experts, Heads, Policy, Reduce, Row

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

    The first layers have a plain MLP; all later layers have experts.
    """

    block: ClassVar[str | tuple[str, ...]] = "DeepseekV2DecoderLayer"
    plan = {**LATENT_ATTENTION, **MLP}
    optional: ClassVar[tuple[str, ...]] = ("self_attn.q_proj", "self_attn.q_b_proj", "mlp")


class DeepseekV2MoEPolicy(Policy):
    """Routed experts and shared experts; the ranks sum the outputs of all experts in one exchange."""

    block: ClassVar[str | tuple[str, ...]] = "DeepseekV2Moe"
    plan = {
        "": Reduce(),
        "experts": Experts(reduce=False),
        "shared_experts.gate_proj": Column(),
        "shared_experts.up_proj": Column(),
        "shared_experts.down_proj": Row(reduce=False),
    }
