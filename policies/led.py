from parallelformers_ng.policies.longformer import WINDOW_ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved

_ATTENTION = moved(WINDOW_ATTENTION, "attention.output.dense", "self_attn.output")


class LEDEncoderPolicy(Policy):
    """Longformer's attention in BART's encoder layer."""

    block = "LEDEncoderLayer"
    plan = {
        **moved(_ATTENTION, "attention.self", "self_attn.longformer_self_attn"),
        "fc1": Column(),
        "fc2": Row(),
    }
