from __future__ import annotations

from parallelformers_ng.policies.xlm import XLMAttentionPolicy, XLMFeedForwardPolicy, XLMPoolerPolicy


class FlaubertAttentionPolicy(XLMAttentionPolicy):
    """XLM's attention."""

    block = "flaubert.MultiHeadAttention"


class FlaubertFeedForwardPolicy(XLMFeedForwardPolicy):
    """XLM's feed-forwards."""

    block = "flaubert.TransformerFFN"


class FlaubertPoolerPolicy(XLMPoolerPolicy):
    """XLM's layers in front of the answers."""

    block = ("FlaubertPoolerEndLogits", "FlaubertPoolerAnswerClass")
