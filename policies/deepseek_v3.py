from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy, DeepseekV2Policy


class DeepseekV3Policy(DeepseekV2Policy):
    """DeepSeek V2's block. V3.2 adds an indexer, which every rank computes whole, so that all ranks attend to the same
    keys."""

    block = ("DeepseekV3DecoderLayer", "DeepseekV32DecoderLayer")


class DeepseekV3MoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek V2's experts with another router."""

    block = ("DeepseekV3MoE", "DeepseekV32MoE")
