from __future__ import annotations

from parallelformers_ng.policies.xlm import XLMAttentionPolicy, XLMFeedForwardPolicy, XLMPoolerPolicy


class FlaubertAttentionPolicy(XLMAttentionPolicy):
    """XLM's attention in FlauBERT."""

    block = "flaubert.MultiHeadAttention"


class FlaubertFeedForwardPolicy(XLMFeedForwardPolicy):
    """XLM's feed-forward in FlauBERT."""

    block = "flaubert.TransformerFFN"


class FlaubertPoolerPolicy(XLMPoolerPolicy):
    """XLM's dense layers before the question-answering heads."""

    block = ("FlaubertPoolerEndLogits", "FlaubertPoolerAnswerClass")
