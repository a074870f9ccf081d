from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class FunnelPolicy(Policy):
    """A block of attention with relative positions and segments, which have their own weights in each head. The
    sequence gets shorter between groups of blocks."""

    block = "FunnelLayer"
    plan = {
        "attention": Heads("config.n_head", scaled=("config.n_head",)),
        "attention.q_head": Column(),
        "attention.k_head": Column(),
        "attention.v_head": Column(),
        "attention.r_w_bias": Slice(0),
        "attention.r_r_bias": Slice(0),
        "attention.r_s_bias": Slice(0),
        "attention.r_kernel": Slice(1),
        "attention.seg_embed": Slice(1),
        "attention.post_proj": Row(),
        "ffn.linear_1": Column(),
        "ffn.linear_2": Row(),
    }
