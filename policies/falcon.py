from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class FalconPolicy(Policy):
    """q, k and v lie together per key/value head, in all three generations: per head, multi-query and grouped.

    ALiBi comes from outside for all heads, on its own or added to the mask.
    """

    block = "FalconDecoderLayer"
    plan = {
        "self_attention": Heads(
            "num_heads", "num_kv_heads", scaled=("hidden_size", "split_size"), biases=("alibi", "attention_mask")
        ),
        "self_attention.query_key_value": Column(interleaved=("query", "key", "key")),
        "self_attention.dense": Row(),
        "mlp.dense_h_to_4h": Column(),
        "mlp.dense_4h_to_h": Row(),
    }
