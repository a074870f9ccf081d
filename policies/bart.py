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
    """Encoder and decoder layers; the decoder's add cross-attention if there is an encoder."""

    block: ClassVar[str | tuple[str, ...]] = ("BartEncoderLayer", "BartDecoderLayer")
    plan = {
        **ATTENTION,
        **moved(ATTENTION, "self_attn", "encoder_attn"),
        "fc1": Column(),
        "fc2": Row(),
    }
    optional = ("encoder_attn",)


class MBartPolicy(BartPolicy):
    """BART's layers with the norms in front."""

    block = ("MBartEncoderLayer", "MBartDecoderLayer")


class PegasusPolicy(BartPolicy):
    """BART's layers with the norms in front and sinusoidal positions."""

    block = ("PegasusEncoderLayer", "PegasusDecoderLayer")


class MarianPolicy(BartPolicy):
    """BART's layers with sinusoidal positions; the vocabularies of encoder and decoder may differ."""

    block = ("MarianEncoderLayer", "MarianDecoderLayer")


class BlenderbotPolicy(BartPolicy):
    """BART's layers with the norms in front."""

    block = ("BlenderbotEncoderLayer", "BlenderbotDecoderLayer")


class BlenderbotSmallPolicy(BartPolicy):
    """BART's layers."""

    block = ("BlenderbotSmallEncoderLayer", "BlenderbotSmallDecoderLayer")


class M2M100Policy(BartPolicy):
    """BART's layers with the norms in front and sinusoidal positions."""

    block = ("M2M100EncoderLayer", "M2M100DecoderLayer")


class PLBartPolicy(BartPolicy):
    """BART's layers over programming languages."""

    block = ("PLBartEncoderLayer", "PLBartDecoderLayer")
