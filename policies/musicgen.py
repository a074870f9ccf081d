from parallelformers_ng.sharding.rules import Column, Policy


class MusicgenPolicy(Policy):
    """The embedding and the output head of each codebook, and the projections from the text encoder and from a melody.
    BART's policy cuts the decoder's layers."""

    block = (
        "MusicgenDecoder", "MusicgenForCausalLM", "MusicgenForConditionalGeneration",
        "MusicgenMelodyDecoder", "MusicgenMelodyForCausalLM", "MusicgenMelodyForConditionalGeneration",
    )  # fmt: skip
    plan = {
        "embed_tokens.*": Column(gather=True),
        "lm_heads.*": Column(gather=True),
        "enc_to_dec_proj": Column(gather=True),
        "audio_enc_to_dec_proj": Column(gather=True),
    }
    optional = ("lm_heads", "enc_to_dec_proj", "audio_enc_to_dec_proj")
