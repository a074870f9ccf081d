from __future__ import annotations

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class FunnelPolicy(Policy):
    """Attention to relative positions and segments, which have weights of their own in each head, and a sequence that
    grows shorter from block to block."""

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


class FunnelHeadPolicy(Policy):
    """The layers in front of the heads."""

    block = ("FunnelDiscriminatorPredictions", "FunnelClassificationHead")
    plan = {"dense": Column(gather=True), "linear_hidden": Column(gather=True)}
    optional = ("dense", "linear_hidden")
