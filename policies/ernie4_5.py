from parallelformers_ng.policies.deepseek_v2 import DeepseekV2MoEPolicy
from parallelformers_ng.policies.llama import LlamaPolicy


class Ernie45Policy(LlamaPolicy):
    """Llama's block. Some layers of the larger models have experts instead of the MLP."""

    block = ("Ernie4_5DecoderLayer", "Ernie4_5_MoeDecoderLayer")
    optional = ("mlp",)


class Ernie45MoEPolicy(DeepseekV2MoEPolicy):
    """DeepSeek's experts. Some configurations have no shared experts."""

    block = "Ernie4_5_MoeSparseMoeBlock"
    optional = ("shared_experts",)
