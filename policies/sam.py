from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class SamVisionPolicy(Policy):
    """The layer of SAM's vision tower. Relative positions are the same for all heads."""

    block: ClassVar[str | tuple[str, ...]] = ("SamVisionLayer", "SamHQVisionLayer")
    plan = {
        "attn": Heads("num_attention_heads"),
        "attn.qkv": Column(fused=3),
        "attn.proj": Row(),
    }


class SamDecoderAttentionPolicy(Policy):
    """The attentions between the mask decoder's tokens and the image."""

    block = ("SamAttention", "SamHQAttention")
    plan = {
        "": Heads("num_attention_heads"),
        "q_proj": Column(),
        "k_proj": Column(),
        "v_proj": Column(),
        "out_proj": Row(),
    }


class SamMLPPolicy(Policy):
    """The MLP of SAM's vision tower and mask decoder."""

    block: ClassVar[str | tuple[str, ...]] = ("SamMLPBlock", "SamHQMLPBlock")
    plan = {"lin1": Column(), "lin2": Row()}


class SamFeedForwardPolicy(Policy):
    """The small MLPs after the mask decoder."""

    block = ("SamFeedForward", "SamHQFeedForward")
    plan = {"proj_in": Column(gather=True), "layers.*": Column(gather=True)}
    optional = ("layers",)
