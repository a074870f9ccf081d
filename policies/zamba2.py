from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved


class Zamba2AttentionPolicy(Policy):
    """Attention over the hidden state and the embeddings, which several layers share. Each layer has its own adapters,
    whose narrow dimension stays whole."""

    block = "Zamba2Attention"
    plan = {
        **moved(ATTENTION, "self_attn", ""),
        "linear_q_adapter_list.*.1": Column(),
        "linear_{k,v}_adapter_list.*.1": Column("key"),
    }
    optional = ("linear_q_adapter_list", "linear_k_adapter_list", "linear_v_adapter_list")


class Zamba2MLPPolicy(Policy):
    """The MLP that several layers share; each layer has its own adapters."""

    block = "Zamba2MLP"
    plan = {"gate_up_proj": Column(fused=2), "gate_up_proj_adapter_list.*.1": Column(fused=2), "down_proj": Row()}
