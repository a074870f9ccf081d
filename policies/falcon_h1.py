from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.policies.mamba2 import INNER, STATE, TIME_STEP, Mamba2Policy
from parallelformers_ng.sharding.rules import Slice, moved


class FalconH1MixerPolicy(Mamba2Policy):
    """Mamba 2's mixer, each piece of `in_proj` with a multiplier; the norm is left out by most configurations."""

    block = "FalconH1Mixer"
    plan = {**Mamba2Policy.plan, "mup_vector": Slice(2, fused=(INNER, INNER, STATE, STATE, TIME_STEP))}
    optional = ("norm",)


class FalconH1Policy(LlamaPolicy):
    """Llama's block, its attention beside the mixer; both read the same norm."""

    block = "FalconH1DecoderLayer"
    plan = moved(LlamaPolicy.plan, "mlp", "feed_forward")
