from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.sharding.rules import moved


class BambaPolicy(LlamaPolicy):
    """Llama's block; most layers have Mamba 2's mixer instead of attention."""

    block = "BambaDecoderLayer"
    plan = moved(LlamaPolicy.plan, "mlp", "feed_forward")
    optional = ("self_attn",)
