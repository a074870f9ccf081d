from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class T5AttentionPolicy(Policy):
    """Self-attention and cross-attention. The table of relative position biases has one column per head. The first
    layer returns its bias as an output before the attention weights, and all other layers use that bias."""

    block = ("T5Attention", "MT5Attention", "SwitchTransformersAttention")
    plan = {
        "": Heads("n_heads", scaled=("inner_dim",), weights=2, more_weights=((1, 1),)),
        "{q,k,v}": Column(),
        "o": Row(),
        "relative_attention_bias": Column(),
    }


class T5FeedForwardPolicy(Policy):
    """The feed-forward: one projection `wi` in T5 v1.0, and a gate `wi_0` beside `wi_1` in later versions."""

    block = (
        "T5DenseActDense", "T5DenseGatedActDense", "MT5DenseActDense", "MT5DenseGatedActDense",
        "SwitchTransformersDenseActDense",
    )  # fmt: skip
    plan = {"{wi,wi_0,wi_1}": Column(), "wo": Row()}
    optional = ("wi", "wi_0", "wi_1")
