from parallelformers_ng.sharding.rules import Column, Policy, Row


class BlipVisionPolicy(Policy):
    """The layer of the vision tower of BLIP, BLIP-2 and InstructBLIP.

    The forward computes the head width from the hidden state's width. Each rank therefore computes attention for all
    heads, on gathered projections.
    """

    block = (
        "BlipEncoderLayer", "Blip2EncoderLayer", "InstructBlipEncoderLayer", "InstructBlipVideoEncoderLayer",
    )  # fmt: skip
    plan = {
        "self_attn.qkv": Column(gather=True),
        "self_attn.projection": Column(gather=True),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }
