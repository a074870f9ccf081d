from parallelformers_ng.sharding.rules import Column, Policy


class MusicgenEmbeddingPolicy(Policy):
    """The embedding of each codebook."""

    block = ("MusicgenDecoder", "MusicgenMelodyDecoder")
    plan = {"embed_tokens.*": Column(gather=True)}


class MusicgenHeadPolicy(Policy):
    """The output head of each codebook."""

    block = ("MusicgenForCausalLM", "MusicgenMelodyForCausalLM")
    plan = {"lm_heads.*": Column(gather=True)}


class MusicgenProjectionPolicy(Policy):
    """The projections from the text encoder, and from a melody, to the decoder."""

    block = ("MusicgenForConditionalGeneration", "MusicgenMelodyForConditionalGeneration")
    plan = {"enc_to_dec_proj": Column(gather=True), "audio_enc_to_dec_proj": Column(gather=True)}
    optional = ("enc_to_dec_proj", "audio_enc_to_dec_proj")
