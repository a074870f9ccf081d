from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

ATTENTION = {
    "self_attn": Heads("num_heads", scaled=("embed_dim",)),
    "self_attn.q_proj": Column(),
    "self_attn.k_proj": Column(),
    "self_attn.v_proj": Column(),
    "self_attn.out_proj": Row(),
}


class BartPolicy(Policy):
    """Encoder and decoder layers. A decoder layer has cross-attention if the model has an encoder."""

    block: ClassVar[str | tuple[str, ...]] = ("BartEncoderLayer", "BartDecoderLayer")
    plan = {
        **ATTENTION,
        **moved(ATTENTION, "self_attn", "encoder_attn"),
        "fc1": Column(),
        "fc2": Row(),
    }
    optional = ("encoder_attn",)


class MBartPolicy(BartPolicy):
    """BART's layers with norms before attention and feed-forward."""

    block = ("MBartEncoderLayer", "MBartDecoderLayer")


class PegasusPolicy(BartPolicy):
    """BART's layers with norms before attention and feed-forward, and sinusoidal positions."""

    block = ("PegasusEncoderLayer", "PegasusDecoderLayer")


class MarianPolicy(BartPolicy):
    """BART's layers with sinusoidal positions; encoder and decoder may have different vocabularies."""

    block = ("MarianEncoderLayer", "MarianDecoderLayer")


class BlenderbotPolicy(BartPolicy):
    """BART's layers with norms before attention and feed-forward."""

    block = ("BlenderbotEncoderLayer", "BlenderbotDecoderLayer")


class BlenderbotSmallPolicy(BartPolicy):
    """BART's layers."""

    block = ("BlenderbotSmallEncoderLayer", "BlenderbotSmallDecoderLayer")


class M2M100Policy(BartPolicy):
    """BART's layers with norms before attention and feed-forward, and sinusoidal positions."""

    block = ("M2M100EncoderLayer", "M2M100DecoderLayer")


class PLBartPolicy(BartPolicy):
    """BART's layers over programming languages."""

    block = ("PLBartEncoderLayer", "PLBartDecoderLayer")
