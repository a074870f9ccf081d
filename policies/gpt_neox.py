from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class GPTNeoXPolicy(Policy):
    """`query_key_value` holds q, k and v of one head, then of the next, so cutting it by heads cuts all three."""

    block = "GPTNeoXLayer"
    plan = {
        "attention": Heads("config.num_attention_heads"),
        "attention.query_key_value": Column(),
        "attention.dense": Row(),
        "mlp.dense_h_to_4h": Column(),
        "mlp.dense_4h_to_h": Row(),
    }
