from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.policies.mamba2 import Mamba2Policy
from parallelformers_ng.sharding.rules import Column, Experts, Policy, Row, moved


class NemotronHMixerPolicy(Mamba2Policy):
    """Mamba 2's mixer."""

    block = "NemotronHMamba2Mixer"


class NemotronHAttentionPolicy(Policy):
    """Llama's attention without rotary positions, a layer of its own."""

    block = "NemotronHAttention"
    plan = moved(ATTENTION, "self_attn", "")


class NemotronHMLPPolicy(Policy):
    """The ungated MLP: a layer of its own, or the experts that all tokens share."""

    block = "NemotronHMLP"
    plan = {"up_proj": Column(), "down_proj": Row()}


class NemotronHMoEPolicy(Policy):
    """Routed experts, ungated; narrow layers around them stay whole."""

    block = "NemotronHMoE"
    plan = {"experts": Experts()}
