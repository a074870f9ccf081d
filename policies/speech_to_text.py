from __future__ import annotations

from parallelformers_ng.policies.bart import BartPolicy


class Speech2TextPolicy(BartPolicy):
    """BART's layers over sound. The convolutions in front stay whole."""

    block = ("Speech2TextEncoderLayer", "Speech2TextDecoderLayer")
