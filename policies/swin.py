from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Policy, Slice


class Swinv2Policy(Policy):
    """Swin v2's block of cosine attention with a scale per head. A small MLP computes the position biases, with one
    output per head."""

    block = "Swinv2Layer"
    plan = {
        **ATTENTION,
        **MLP,
        "attention.self.logit_scale": Slice(0),
        "attention.self.continuous_position_bias_mlp.2": Column(),
    }
