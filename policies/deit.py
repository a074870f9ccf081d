from __future__ import annotations

from parallelformers_ng.policies.vit import ViTPolicy


class DeiTPolicy(ViTPolicy):
    """ViT's layer. A distilled model has one more token."""

    block = "DeiTLayer"
