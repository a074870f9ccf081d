from parallelformers_ng.policies.vit import ViTPolicy
from parallelformers_ng.sharding.rules import Slice


class SwinPolicy(ViTPolicy):
    """ViT's block over shifted windows. The table of position biases has one column per head."""

    block = "SwinLayer"
    plan = {**ViTPolicy.plan, "attention.relative_position_bias.relative_position_bias_table": Slice(1)}
