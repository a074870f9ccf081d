from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class FunnelPolicy(Policy):
    """A block of attention with relative positions and segments, which have their own weights in each head. The
    sequence gets shorter between groups of blocks."""

    block = "FunnelLayer"
    plan = {
        "attention": Heads("config.n_head", scaled=("config.n_head",)),
        **dict.fromkeys(("attention.q_head", "attention.k_head", "attention.v_head"), Column()),
        **dict.fromkeys(("attention.r_w_bias", "attention.r_r_bias", "attention.r_s_bias"), Slice(0)),
        "attention.r_kernel": Slice(1),
        "attention.seg_embed": Slice(1),
        "attention.post_proj": Row(),
        "ffn.linear_1": Column(),
        "ffn.linear_2": Row(),
    }
