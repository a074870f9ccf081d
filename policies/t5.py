from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class T5AttentionPolicy(Policy):
    """Self-attention and cross-attention. The table of relative position biases has one column per head. The first
    layer returns its bias as an output before the attention weights, and all other layers use that bias."""

    block = ("T5Attention", "MT5Attention", "SwitchTransformersAttention")
    plan = {
        "": Heads("n_heads", scaled=("inner_dim",), weights=2, more_weights=((1, 1),)),
        "q": Column(),
        "k": Column(),
        "v": Column(),
        "o": Row(),
        "relative_attention_bias": Column(),
    }


class T5FeedForwardPolicy(Policy):
    """The ungated feed-forward of T5 v1.0."""

    block = ("T5DenseActDense", "MT5DenseActDense", "SwitchTransformersDenseActDense")
    plan = {"wi": Column(), "wo": Row()}


class T5GatedFeedForwardPolicy(Policy):
    """The gated feed-forward of T5 v1.1 and later."""

    block = ("T5DenseGatedActDense", "MT5DenseGatedActDense")
    plan = {"wi_0": Column(), "wi_1": Column(), "wo": Row()}
