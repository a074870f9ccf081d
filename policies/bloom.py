from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class BloomPolicy(Policy):
    """BLOOM's block; `query_key_value` is interleaved per head. The model computes ALiBi for all heads, and each rank
    takes the part of its heads.

    The policy does not fit `slow_but_exact`: the forward then multiplies by weights without calling their layers, so
    ranks could not sum.
    """

    block = "BloomBlock"
    plan = {
        "self_attention": Heads("num_heads", scaled=("hidden_size", "split_size"), biases=("alibi",)),
        "self_attention.query_key_value": Column(),
        "self_attention.dense": Row(),
        "mlp.dense_h_to_4h": Column(),
        "mlp.dense_4h_to_h": Row(),
    }
    requires = {"self_attention.slow_but_exact": False}
