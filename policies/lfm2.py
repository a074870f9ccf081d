from parallelformers_ng.policies.llama import HEADS
from parallelformers_ng.sharding.rules import Column, Experts, Policy, Row


class Lfm2Policy(Policy):
    """A layer with attention or a short convolution, and a gated MLP or experts."""

    block = ("Lfm2DecoderLayer", "Lfm2MoeDecoderLayer")
    plan = {
        **HEADS,
        "self_attn.out_proj": Row(),
        "feed_forward.{w1,w3}": Column(),
        "feed_forward.w2": Row(),
        "feed_forward.experts": Experts(),
    }
    optional = ("self_attn", "feed_forward")


class Lfm2ConvolutionPolicy(Policy):
    """A gated depthwise convolution. `in_proj` packs two gates and the input as three equal parts."""

    block = ("Lfm2ShortConv", "Lfm2MoeShortConv")
    plan = {"in_proj": Column(fused=3), "conv": Column(), "out_proj": Row()}
