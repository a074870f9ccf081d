from parallelformers_ng.sharding.rules import Column, Policy


class EncoderDecoderPolicy(Policy):
    """The projection from the encoder's width to the decoder's width. The encoder and the decoder have their own
    policies."""

    block = ("EncoderDecoderModel", "VisionEncoderDecoderModel", "SpeechEncoderDecoderModel")
    plan = {"enc_to_dec_proj": Column(gather=True)}
    optional = ("enc_to_dec_proj",)
