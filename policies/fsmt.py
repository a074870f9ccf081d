from parallelformers_ng.policies.bart import BartPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Vocabulary


class FSMTPolicy(BartPolicy):
    """BART's layers whose attention takes the width of its merged heads from its input. FSMT's inputs are
    `[sequence, batch, …]`."""

    block = ("fsmt.EncoderLayer", "fsmt.DecoderLayer", "LEDDecoderLayer")
    plan = {
        **BartPolicy.plan,
        "self_attn": Heads("num_heads", input_width=True),
        "encoder_attn": Heads("num_heads", input_width=True),
    }


class FSMTVocabularyPolicy(Policy):
    """The decoder's embedding and output head. The decoder's vocabulary differs from the encoder's."""

    block = "FSMTDecoder"
    plan = {"embed_tokens": Vocabulary(), "output_projection": Column(gather=True)}
