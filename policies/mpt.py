from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class MptPolicy(Policy):
    """MPT's block with q, k and v side by side. The model computes ALiBi for all heads, and each rank takes the part of
    its heads."""

    block = "MptBlock"
    plan = {
        "attn": Heads("n_heads", scaled=("hidden_size",), biases=("position_bias",)),
        "attn.Wqkv": Column(fused=3),
        "attn.out_proj": Row(),
        "ffn.up_proj": Column(),
        "ffn.down_proj": Row(),
    }
