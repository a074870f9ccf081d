from parallelformers_ng.sharding.attention import XLNetAttentionParallel
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


class XLNetPolicy(Policy):
    """XLNet's layer. Its projections are bare parameters `[d_model, heads, d_head]`, also for positions (`r`); segments
    have heads as well. With a target mapping, the layer has two streams with separate attention weights."""

    block = "XLNetLayer"
    plan = {
        "rel_attn": Heads(
            "n_head", layer=XLNetAttentionParallel, weights=2, weights_dim=3, more_weights=(((2, 0), 3), ((2, 1), 3))
        ),
        "rel_attn.{q,k,v,r}": Slice(1),
        "rel_attn.o": Slice(1, partial=True),
        "rel_attn.{r_r,r_s,r_w}_bias": Slice(0),
        "rel_attn.seg_embed": Slice(1),
        "ff.layer_1": Column(),
        "ff.layer_2": Row(),
    }
