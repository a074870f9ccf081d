from __future__ import annotations

from parallelformers_ng.policies.bart import BartPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class Speech2TextPolicy(BartPolicy):
    """BART's layers over sound."""

    block = ("Speech2TextEncoderLayer", "Speech2TextDecoderLayer")


class Speech2TextSubsamplerPolicy(Policy):
    """The convolutions in front. Each is followed by a gate over halves of its channels, so these are put together."""

    block = "speech_to_text.Conv1dSubsampler"
    plan = {"conv_layers.*": Column("column", gather=True)}
