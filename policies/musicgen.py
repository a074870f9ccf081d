from parallelformers_ng.sharding.rules import Column, Policy


class MusicgenPolicy(Policy):
    """The embedding and the output head of each codebook, and the projections from the text encoder and from a melody.
    BART's policy cuts the decoder's layers."""

    block = (
        "MusicgenDecoder", "MusicgenForCausalLM", "MusicgenForConditionalGeneration",
        "MusicgenMelodyDecoder", "MusicgenMelodyForCausalLM", "MusicgenMelodyForConditionalGeneration",
    )  # fmt: skip
    optional = ("lm_heads.*", "enc_to_dec_proj", "audio_enc_to_dec_proj")
    plan = dict.fromkeys(("embed_tokens.*", *optional), Column(gather=True))
