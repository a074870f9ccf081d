from parallelformers_ng.policies.bart import BartPolicy


class WhisperPolicy(BartPolicy):
    """BART's layers over audio; the projections of keys have no bias. The convolutions before the encoder are small and
    stay whole."""

    block = ("WhisperEncoderLayer", "WhisperDecoderLayer")
