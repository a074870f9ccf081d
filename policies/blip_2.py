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


class Blip2ProjectionPolicy(Policy):
    """The projection from the queries to the width of the language model."""

    block = (
        "Blip2Model", "Blip2ForConditionalGeneration", "InstructBlipModel", "InstructBlipForConditionalGeneration",
        "InstructBlipVideoModel", "InstructBlipVideoForConditionalGeneration",
    )  # fmt: skip
    plan = {"language_projection": Column(gather=True)}
    optional = ("language_projection",)
