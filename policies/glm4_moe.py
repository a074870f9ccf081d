from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy, DeepseekV2Policy
from parallelformers_ng.policies.llama import LlamaPolicy


class Glm4MoePolicy(LlamaPolicy):
    """GLM 4.5's layer: Llama's attention, with a norm per head on q and k in some configurations. The first layers have
    a plain MLP."""

    block = ("Glm4MoeDecoderLayer", "Glm4vMoeTextDecoderLayer")
    optional = ("mlp",)


class GlmLatentPolicy(DeepseekV2Policy):
    """DeepSeek V2's block in GLM 4.7 Flash and GLM 5. GLM 5 also has DeepSeek V3.2's indexer, which stays whole."""

    block = ("Glm4MoeLiteDecoderLayer", "GlmMoeDsaDecoderLayer")


class GlmMoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek's experts in GLM."""

    block = ("Glm4MoeMoE", "Glm4MoeLiteMoE", "GlmMoeDsaMoE", "Glm4vMoeTextMoE")
