from __future__ import annotations

from parallelformers_ng.policies.t5 import T5AttentionPolicy, T5FeedForwardPolicy


class SwitchTransformersAttentionPolicy(T5AttentionPolicy):
    """T5's attention under another name."""

    block = "SwitchTransformersAttention"


class SwitchTransformersFeedForwardPolicy(T5FeedForwardPolicy):
    """T5's feed-forward, alone and as each of the experts. All ranks route alike."""

    block = "SwitchTransformersDenseActDense"
