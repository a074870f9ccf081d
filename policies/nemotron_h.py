from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Experts, Policy, Row, moved


class NemotronHAttentionPolicy(Policy):
    """Llama's attention without rotary positions, as a separate layer."""

    block = "NemotronHAttention"
    plan = moved(ATTENTION, "self_attn", "")


class NemotronHMLPPolicy(Policy):
    """The ungated MLP: a separate layer, or the experts that all tokens share."""

    block = "NemotronHMLP"
    plan = {"up_proj": Column(), "down_proj": Row()}


class NemotronHMoEPolicy(Policy):
    """Ungated routed experts. The narrow layers before and after the experts stay whole."""

    block = "NemotronHMoE"
    plan = {"experts": Experts()}
