from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

ATTENTION = {
    "self_attn": Heads("num_heads", scaled=("embed_dim",)),
    "self_attn.{q,k,v}_proj": Column(),
    "self_attn.out_proj": Row(),
}


class BartPolicy(Policy):
    """Encoder and decoder layers. A decoder layer has cross-attention if the model has an encoder.

    The blocks differ in what needs no rule: places of norms, positions, biases, and what the layers before them read.
    `num_heads` is set per rank, because OPT's forward views q as `(batch, -1, num_heads, head_dim)`: with the whole
    number of heads, `-1` would become a wrong length.
    """

    block = (
        "BartEncoderLayer", "BartDecoderLayer", "MBartEncoderLayer", "MBartDecoderLayer", "PegasusEncoderLayer",
        "PegasusDecoderLayer", "MarianEncoderLayer", "MarianDecoderLayer", "BlenderbotEncoderLayer",
        "BlenderbotDecoderLayer", "BlenderbotSmallEncoderLayer", "BlenderbotSmallDecoderLayer", "M2M100EncoderLayer",
        "M2M100DecoderLayer", "PLBartEncoderLayer", "PLBartDecoderLayer", "BigBirdPegasusDecoderLayer",
        "MusicgenDecoderLayer", "MusicgenMelodyDecoderLayer", "Speech2TextEncoderLayer", "Speech2TextDecoderLayer",
        "TimeSeriesTransformerEncoderLayer", "TimeSeriesTransformerDecoderLayer", "WhisperEncoderLayer",
        "WhisperDecoderLayer", "OPTDecoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, **moved(ATTENTION, "self_attn", "encoder_attn"), "fc1": Column(), "fc2": Row()}
    optional = ("encoder_attn",)


class FSMTPolicy(Policy):
    """BART's layers whose attention takes the width of its merged heads from its input. FSMT's inputs are
    `[sequence, batch, …]`."""

    block = ("fsmt.EncoderLayer", "fsmt.DecoderLayer", "LEDDecoderLayer")
    plan = {
        **BartPolicy.plan,
        "self_attn": Heads("num_heads", input_width=True),
        "encoder_attn": Heads("num_heads", input_width=True),
    }
    optional = ("encoder_attn",)
