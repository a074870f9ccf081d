from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, moved

ATTENTION = {
    "attention.self": Heads("num_attention_heads", scaled=("all_head_size",)),
    "attention.self.{query,key,value}": Column(),
    "attention.output.dense": Row(heads="attention.self"),
}
MLP = {"intermediate.dense": Column(), "output.dense": Row()}


class BertPolicy(Policy):
    """BERT's block, which most encoders from 2018 to 2021 have. In a decoder, the block may have cross-attention.

    The blocks differ in what needs no rule: places of norms, and positions, boxes or images in the embeddings.
    """

    block = (
        "BertLayer", "BertGenerationLayer", "BlipTextLayer", "ElectraLayer", "LayoutLMLayer", "MegatronBertLayer",
        "RobertaLayer", "XLMRobertaLayer", "XLMRobertaXLLayer", "CamembertLayer", "RobertaPreLayerNormLayer",
        "Data2VecTextLayer", "RoFormerLayer", "TapasLayer", "VisualBertLayer",
    )  # fmt: skip
    plan = {**ATTENTION, **moved(ATTENTION, "attention", "crossattention"), **MLP}
    optional = ("crossattention",)
