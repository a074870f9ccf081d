from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class BarkPolicy(Policy):
    """GPT-2's block with q, k and v side by side, in all three models of Bark."""

    block = "BarkBlock"
    plan = {
        "attn": Heads("num_heads", scaled=("embed_dim",)),
        "attn.att_proj": Column(fused=3),
        "attn.out_proj": Row(),
        "mlp.in_proj": Column(),
        "mlp.out_proj": Row(),
    }
