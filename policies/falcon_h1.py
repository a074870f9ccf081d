from parallelformers_ng.policies.llama import LlamaPolicy
from parallelformers_ng.policies.mamba import INNER, STATE, TIME_STEP, Mamba2Policy
from parallelformers_ng.sharding.rules import Slice, moved


class FalconH1MixerPolicy(Mamba2Policy):
    """Mamba 2's mixer with a multiplier for each part of `in_proj`. Most configurations have no norm."""

    block = "FalconH1Mixer"
    plan = {**Mamba2Policy.plan, "mup_vector": Slice(2, fused=(INNER, INNER, STATE, STATE, TIME_STEP))}
    optional = ("norm",)


class FalconH1Policy(LlamaPolicy):
    """Llama's block with a mixer beside the attention; mixer and attention read the output of the same norm."""

    block = "FalconH1DecoderLayer"
    plan = moved(LlamaPolicy.plan, "mlp", "feed_forward")
