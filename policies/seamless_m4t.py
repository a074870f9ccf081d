from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice, moved


class SeamlessM4TPolicy(Policy):
    """BART's attention in encoder and decoder layers, over text and over units of speech."""

    block = (
        "SeamlessM4TEncoderLayer", "SeamlessM4TDecoderLayer", "SeamlessM4Tv2EncoderLayer", "SeamlessM4Tv2DecoderLayer",
        "SeamlessM4Tv2TextToUnitDecoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, **moved(ATTENTION, "self_attn", "cross_attention"), "ffn.fc1": Column(), "ffn.fc2": Row()}
    optional = ("cross_attention", "ffn")


class SeamlessConformerAttentionPolicy(Policy):
    """Attention over audio. Relative positions have a projection and biases per head, or a distance embedding for all
    heads."""

    block = ("SeamlessM4TConformerSelfAttention", "SeamlessM4Tv2ConformerSelfAttention")
    plan = {
        "": Heads("num_heads"),
        "linear_{q,k,v,pos}": Column(),
        "pos_bias_{u,v}": Slice(0),
        "linear_out": Row(),
    }
    optional = ("linear_pos", "pos_bias_u", "pos_bias_v")


class SeamlessConformerFeedForwardPolicy(Policy):
    """The feed-forwards before and after the attention over audio. The convolutions between the feed-forwards stay
    whole."""

    block = ("SeamlessM4TConformerFeedForward", "SeamlessM4Tv2ConformerFeedForward")
    plan = {"intermediate_dense": Column(), "output_dense": Row()}
