from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class FunnelPolicy(Policy):
    """A block of attention with relative positions and segments, which have their own weights in each head. The
    sequence gets shorter between groups of blocks."""

    block = "FunnelLayer"
    plan = {
        "attention": Heads("config.n_head", scaled=("config.n_head",)),
        "attention.{q,k,v}_head": Column(),
        "attention.{r_w,r_r,r_s}_bias": Slice(0),
        "attention.{r_kernel,seg_embed}": Slice(1),
        "attention.post_proj": Row(),
        "ffn.linear_1": Column(),
        "ffn.linear_2": Row(),
    }
