from parallelformers_ng.policies.llama import ATTENTION, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Experts, Policy, Reduce, Row


class HunYuanMoEAttentionPolicy(LlamaPolicy):
    """HunYuan's attention in blocks with experts."""

    block = "HunYuanMoEV1DecoderLayer"
    plan = ATTENTION


class HunYuanMoEPolicy(Policy):
    """Routed experts and an MLP for all tokens; the ranks sum the outputs of experts and MLP in one exchange."""

    block = "HunYuanMoEV1Moe"
    plan = {
        "": Reduce(),
        "experts": Experts(reduce=False),
        "shared_mlp.gate_proj": Column(),
        "shared_mlp.up_proj": Column(),
        "shared_mlp.down_proj": Row(reduce=False),
    }
