from parallelformers_ng.policies.bart import BartPolicy
from parallelformers_ng.sharding.rules import Heads


class FSMTPolicy(BartPolicy):
    """BART's layers whose attention takes the width of its merged heads from its input. FSMT's inputs are
    `[sequence, batch, …]`."""

    block = ("fsmt.EncoderLayer", "fsmt.DecoderLayer", "LEDDecoderLayer")
    plan = {
        **BartPolicy.plan,
        "self_attn": Heads("num_heads", input_width=True),
        "encoder_attn": Heads("num_heads", input_width=True),
    }
