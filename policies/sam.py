from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.policies.qwen_vl import VISION_ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved


class SamVisionPolicy(Policy):
    """The layer of SAM's vision tower, which DeepSeek-OCR 2 runs before its own encoder. Relative positions are the
    same for all heads."""

    block = (
        "SamVisionLayer", "SamHQVisionLayer", "DeepseekOcr2SamVisionLayer", "UnlimitedOcrSamVisionLayer",
    )  # fmt: skip
    plan = {**VISION_ATTENTION, "attn": Heads("num_attention_heads")}


class SamDecoderAttentionPolicy(Policy):
    """The attentions between the mask decoder's tokens and the image."""

    block = ("SamAttention", "SamHQAttention")
    plan = {**moved(ATTENTION, "self_attn", ""), "": Heads("num_attention_heads")}


class SamMLPPolicy(Policy):
    """The MLP of SAM's vision tower and mask decoder, and XLM's feed-forward."""

    block = (
        "SamMLPBlock", "SamHQMLPBlock", "DeepseekOcr2SamMLPBlock", "UnlimitedOcrSamMLPBlock", "xlm.TransformerFFN",
        "flaubert.TransformerFFN",
    )  # fmt: skip
    plan = {"lin1": Column(), "lin2": Row()}


class SamFeedForwardPolicy(Policy):
    """The small MLPs on the outputs of SAM's mask decoder."""

    block = ("SamFeedForward", "SamHQFeedForward")
    plan = {"proj_in": Column(gather=True), "layers.*": Column(gather=True)}
    optional = ("layers",)
