from __future__ import annotations

from parallelformers_ng.sharding.rules import Column, Policy


class EncoderDecoderPolicy(Policy):
    """From the width of one model, the encoder, to that of another, the decoder. Both have policies of their own."""

    block = ("EncoderDecoderModel", "VisionEncoderDecoderModel", "SpeechEncoderDecoderModel")
    plan = {"enc_to_dec_proj": Column(gather=True)}
    optional = ("enc_to_dec_proj",)
