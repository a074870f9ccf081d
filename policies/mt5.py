from __future__ import annotations

from parallelformers_ng.policies.t5 import T5AttentionPolicy, T5FeedForwardPolicy, T5GatedFeedForwardPolicy


class MT5AttentionPolicy(T5AttentionPolicy):
    """T5's attention in mT5."""

    block = "MT5Attention"


class MT5FeedForwardPolicy(T5FeedForwardPolicy):
    """T5's ungated feed-forward in mT5."""

    block = "MT5DenseActDense"


class MT5GatedFeedForwardPolicy(T5GatedFeedForwardPolicy):
    """T5's gated feed-forward in mT5."""

    block = "MT5DenseGatedActDense"
