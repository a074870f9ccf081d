from typing import ClassVar

from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

ATTENTION = {
    "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
    "attention.self.query": Column(),
    "attention.self.key": Column(),
    "attention.self.value": Column(),
    "attention.output.dense": Row(heads="attention.self"),
}
MLP = {"intermediate.dense": Column(), "output.dense": Row()}


class BertPolicy(Policy):
    """The encoder block of most encoders from 2018 to 2021. In a decoder, the block may have cross-attention."""

    block: ClassVar[str | tuple[str, ...]] = "BertLayer"
    plan = {**ATTENTION, **moved(ATTENTION, "attention", "crossattention"), **MLP}
    optional: ClassVar[tuple[str, ...]] = ("crossattention",)


class BertHeadPolicy(Policy):
    """Dense layers between the blocks and the output heads: the masked-language transform and the first token's
    pooler."""

    block: ClassVar[str | tuple[str, ...]] = ("BertPredictionHeadTransform", "BertPooler")
    plan = {"dense": Column(gather=True)}
