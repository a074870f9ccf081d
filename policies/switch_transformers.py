from __future__ import annotations

from parallelformers_ng.policies.t5 import T5AttentionPolicy, T5FeedForwardPolicy


class SwitchTransformersAttentionPolicy(T5AttentionPolicy):
    """T5's attention in Switch Transformers."""

    block = "SwitchTransformersAttention"


class SwitchTransformersFeedForwardPolicy(T5FeedForwardPolicy):
    """T5's feed-forward, outside and inside the experts. All ranks choose the same experts."""

    block = "SwitchTransformersDenseActDense"
