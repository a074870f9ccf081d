from parallelformers_ng.sharding.rules import Column, Policy


class Speech2TextSubsamplerPolicy(Policy):
    """The convolutions before the encoder. Their outputs are gathered, because a gate over halves of the channels
    follows each convolution."""

    block = "speech_to_text.Conv1dSubsampler"
    plan = {"conv_layers.*": Column("column", gather=True)}
