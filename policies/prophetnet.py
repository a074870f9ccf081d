from parallelformers_ng.sharding.attention import NgramAttentionParallel
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

_ATTENTION = {
    "self_attn": Heads("num_attn_heads", biases=("attention_mask",), input_width=True),
    "self_attn.{query,key,value}_proj": Column(),
    "self_attn.out_proj": Row(),
}


class ProphetNetEncoderPolicy(Policy):
    """ProphetNet's encoder layer. The model makes a mask for all heads."""

    block = "ProphetNetEncoderLayer"
    plan = {**_ATTENTION, "feed_forward.intermediate": Column(), "feed_forward.output": Row()}


class ProphetNetDecoderPolicy(ProphetNetEncoderPolicy):
    """ProphetNet's decoder layer, which predicts several future tokens. Each future token has its own stream beside the
    main stream."""

    block = "ProphetNetDecoderLayer"
    plan = {
        **ProphetNetEncoderPolicy.plan,
        "self_attn": Heads(
            "num_attn_heads",
            biases=("attention_mask", "extended_predict_attention_mask"),
            more_weights=((2, 2),),
            layer=NgramAttentionParallel,
        ),
        "self_attn.relative_pos_embeddings": Column("column", gather=True),
        **moved(_ATTENTION, "self_attn", "cross_attn"),
    }
    optional = ("cross_attn",)
