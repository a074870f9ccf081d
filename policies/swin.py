from parallelformers_ng.policies.vit import ViTPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Slice


class SwinPolicy(ViTPolicy):
    """ViT's block over shifted windows; the table of position biases has a column per head."""

    block = "SwinLayer"
    plan = {**ViTPolicy.plan, "attention.relative_position_bias.relative_position_bias_table": Slice(1)}


class SwinMergingPolicy(Policy):
    """From four patches to one, between the stages."""

    block = "SwinPatchMerging"
    plan = {"reduction": Column(gather=True)}
