from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy


class Ernie45MoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek's experts. Some configurations have no shared experts."""

    block = "Ernie4_5_MoeSparseMoeBlock"
    optional = ("shared_experts",)
