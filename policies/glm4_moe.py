from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy, DeepseekV2Policy
from parallelformers_ng.policies.llama import LlamaPolicy


class Glm4MoePolicy(LlamaPolicy):
    """GLM 4.5: Llama's attention, with a norm per head where the configuration says so, and a plain MLP at first."""

    block = ("Glm4MoeDecoderLayer", "Glm4vMoeTextDecoderLayer")
    optional = ("mlp",)


class GlmLatentPolicy(DeepseekV2Policy):
    """GLM 4.7 Flash and GLM 5: DeepSeek V2's block, the latter with the indexer of V3.2, which stays whole."""

    block = ("Glm4MoeLiteDecoderLayer", "GlmMoeDsaDecoderLayer")


class GlmMoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek's experts."""

    block = ("Glm4MoeMoE", "Glm4MoeLiteMoE", "GlmMoeDsaMoE", "Glm4vMoeTextMoE")
