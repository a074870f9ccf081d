from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class GPTNeoPolicy(Policy):
    """GPT-Neo's block with global or local attention. The window of local attention is in a mask that all heads
    share."""

    block = "GPTNeoBlock"
    plan = {
        "attn.attention": Heads("num_heads", scaled=("embed_dim",)),
        "attn.attention.q_proj": Column(),
        "attn.attention.k_proj": Column(),
        "attn.attention.v_proj": Column(),
        "attn.attention.out_proj": Row(),
        "mlp.c_fc": Column(),
        "mlp.c_proj": Row(),
    }
