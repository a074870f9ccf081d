from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class GPTNeoXPolicy(Policy):
    """GPT-NeoX's block. `query_key_value` packs q, k and v head by head, so a cut by heads cuts q, k and v alike."""

    block = "GPTNeoXLayer"
    plan = {
        "attention": Heads("config.num_attention_heads"),
        "attention.query_key_value": Column(),
        "attention.dense": Row(),
        "mlp.dense_h_to_4h": Column(),
        "mlp.dense_4h_to_h": Row(),
    }
