from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class BloomPolicy(Policy):
    """`query_key_value` is interleaved per head; the model makes the ALiBi of all heads, and each rank takes its own.

    The slow, exact path multiplies with the weights past their layers, so no sum over the ranks can be inserted.
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
