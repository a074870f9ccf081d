from __future__ import annotations

from parallelformers_ng.policies.bart import BartPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class Speech2TextPolicy(BartPolicy):
    """BART's layers over audio."""

    block = ("Speech2TextEncoderLayer", "Speech2TextDecoderLayer")


class Speech2TextSubsamplerPolicy(Policy):
    """The convolutions before the encoder. Their outputs are gathered, because a gate over halves of the channels
    follows each convolution."""

    block = "speech_to_text.Conv1dSubsampler"
    plan = {"conv_layers.*": Column("column", gather=True)}
