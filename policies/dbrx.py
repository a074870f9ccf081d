from parallelformers_ng.sharding.rules import Column, Heads, Policy, Reduce, Row, Slice


class DbrxPolicy(Policy):
    """A block that packs q, k and v side by side. One matrix has the rows of all experts, and each expert is cut by
    width."""

    block = "DbrxBlock"
    plan = {
        "norm_attn_norm.attn": Heads(
            "num_heads", "num_key_value_heads", groups="num_key_value_groups", scaled=("hidden_size",)
        ),
        "norm_attn_norm.attn.Wqkv": Column(fused=("query", "key", "key")),
        "norm_attn_norm.attn.out_proj": Row(),
        "ffn": Reduce(),
        "ffn.experts": Heads("ffn_hidden_size"),
        "ffn.experts.mlp.{w1,v1}": Slice(0, fused="num_experts"),
        "ffn.experts.mlp.w2": Slice(0, fused="num_experts", partial=True),
    }
