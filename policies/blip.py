from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved


class BlipVisionPolicy(Policy):
    """The layer of the vision tower of BLIP, BLIP-2 and InstructBLIP.

    The forward computes the head width from the hidden state's width. Each rank therefore computes attention for all
    heads, on gathered projections.
    """

    block = (
        "BlipEncoderLayer", "Blip2EncoderLayer", "InstructBlipEncoderLayer", "InstructBlipVideoEncoderLayer",
    )  # fmt: skip
    plan = {
        "self_attn.{qkv,projection}": Column(gather=True),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


_ATTENTION = moved(ATTENTION, "attention.self", "attention.attention")


class Blip2QFormerPolicy(Policy):
    """BERT's block with a separate feed-forward for the queries; every second layer attends to the image."""

    block = ("Blip2QFormerLayer", "InstructBlipQFormerLayer", "InstructBlipVideoQFormerLayer")
    plan = {
        **_ATTENTION,
        **moved(_ATTENTION, "attention", "crossattention"),
        **MLP,
        "intermediate_query.dense": Column(),
        "output_query.dense": Row(),
    }
    optional = ("crossattention", "intermediate", "output")
