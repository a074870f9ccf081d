from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.policies.mamba2 import Mamba2Policy


class BambaMixerPolicy(Mamba2Policy):
    """Mamba 2's mixer."""

    block = "BambaMixer"


class BambaPolicy(LlamaPolicy):
    """Llama's block, with the mixer in place of attention in most layers."""

    block = "BambaDecoderLayer"
    plan = {path.replace("mlp.", "feed_forward."): rule for path, rule in LlamaPolicy.plan.items()}
    optional = ("self_attn",)
