from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class T5AttentionPolicy(Policy):
    """Self- and cross-attention alike. The relative position bias has a column per head; the first layer gives its own
    out, before the weights, and it goes on to all."""

    block = "T5Attention"
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

    block = "T5DenseActDense"
    plan = {"wi": Column(), "wo": Row()}


class T5GatedFeedForwardPolicy(Policy):
    """The gated feed-forward of T5 v1.1 and later."""

    block = "T5DenseGatedActDense"
    plan = {"wi_0": Column(), "wi_1": Column(), "wo": Row()}
