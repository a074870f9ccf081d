from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy
from parallelformers_ng.sharding.rules import Policy, moved


class HunYuanMoEPolicy(Policy):
    """Routed experts and an MLP for all tokens; the ranks sum the outputs of experts and MLP in one exchange."""

    block = "HunYuanMoEV1Moe"
    plan = moved(DeepseekV2MoEPolicy.plan, "shared_experts", "shared_mlp")
