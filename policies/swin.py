from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.policies.vit import ViTPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Slice


class SwinPolicy(ViTPolicy):
    """ViT's block over shifted windows. The table of position biases has one column per head."""

    block = "SwinLayer"
    plan = {**ViTPolicy.plan, "attention.relative_position_bias.relative_position_bias_table": Slice(1)}


class Swinv2Policy(Policy):
    """A block of cosine attention with a scale per head. A small MLP computes the position biases, with one output per
    head."""

    block = "Swinv2Layer"
    plan = {
        **ATTENTION,
        **MLP,
        "attention.self.logit_scale": Slice(0),
        "attention.self.continuous_position_bias_mlp.2": Column(),
    }
