from __future__ import annotations

from parallelformers_ng.policies.bart import BartPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Vocabulary


class FSMTPolicy(BartPolicy):
    """BART's layers with the sequence in front of the batch, and two vocabularies."""

    block = ("fsmt.EncoderLayer", "fsmt.DecoderLayer")
    plan = {
        **BartPolicy.plan,
        "self_attn": Heads("num_heads", input_width=True),
        "encoder_attn": Heads("num_heads", input_width=True),
    }


class FSMTVocabularyPolicy(Policy):
    """The decoder's vocabulary, which is not the encoder's, and the head over it."""

    block = "FSMTDecoder"
    plan = {"embed_tokens": Vocabulary(), "output_projection": Column(gather=True)}
