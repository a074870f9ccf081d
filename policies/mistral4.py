from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy, DeepseekV2Policy


class Mistral4Policy(DeepseekV2Policy):
    """DeepSeek V2's block in Mistral 4."""

    block = "Mistral4DecoderLayer"


class Mistral4MoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek V2's experts in Mistral 4."""

    block = "Mistral4MoE"
