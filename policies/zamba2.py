from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.policies.mamba2 import Mamba2Policy
from parallelformers_ng.sharding.rules import Column, Policy, Row


class Zamba2MixerPolicy(Mamba2Policy):
    """Mamba 2's mixer."""

    block = "Zamba2MambaMixer"


class Zamba2AttentionPolicy(Policy):
    """Attention that several layers share, over the hidden state beside the embeddings; each has adapters of its own,
    whose narrow side stays whole."""

    block = "Zamba2Attention"
    plan = {
        "": ATTENTION["self_attn"],
        "q_proj": Column(),
        "k_proj": Column("key"),
        "v_proj": Column("key"),
        "o_proj": Row(),
        "linear_q_adapter_list.*.1": Column(),
        "linear_k_adapter_list.*.1": Column("key"),
        "linear_v_adapter_list.*.1": Column("key"),
    }
    optional = ("linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list")


class Zamba2MLPPolicy(Policy):
    """The MLP that these layers share, with adapters as well."""

    block = "Zamba2MLP"
    plan = {
        "gate_up_proj": Column(fused=2),
        "gate_up_proj_adapter_list.*.1": Column(fused=2),
        "down_proj": Row(),
    }


class Zamba2ProjectionPolicy(Policy):
    """From the shared layers back into those of the mixer."""

    block = "Zamba2HybridLayer"
    plan = {"linear": Column(gather=True)}
