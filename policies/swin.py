from parallelformers_ng.policies.vit import ViTPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Slice


class SwinPolicy(ViTPolicy):
    """ViT's block over shifted windows. The table of position biases has one column per head."""

    block = "SwinLayer"
    plan = {**ViTPolicy.plan, "attention.relative_position_bias.relative_position_bias_table": Slice(1)}


class SwinMergingPolicy(Policy):
    """The layer that merges four patches into one between two stages of Swin."""

    block = ("SwinPatchMerging", "Swinv2PatchMerging")
    plan = {"reduction": Column(gather=True)}
