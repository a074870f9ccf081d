from parallelformers_ng.policies.bert import ATTENTION, MLP
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved

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
