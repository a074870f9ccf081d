from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.policies.vit import ViTPolicy


class Dinov2Policy(ViTPolicy):
    """ViT's block. The giant model has a gated MLP."""

    block = ("Dinov2Layer", "Dinov2WithRegistersLayer")
    plan = {**ViTPolicy.plan, **MLP}
    optional = ("mlp",)
