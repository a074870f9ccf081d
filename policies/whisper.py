from parallelformers_ng.policies.bart import BartPolicy


class WhisperPolicy(BartPolicy):
    """BART's layers over sound; keys have no bias. The convolutions in front are small and stay whole."""

    block = ("WhisperEncoderLayer", "WhisperDecoderLayer")
