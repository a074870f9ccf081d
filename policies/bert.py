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
    """The encoder block of most encoders from 2018 to 2021. In a decoder, the block may have cross-attention.

    The blocks differ in what needs no rule: places of norms, and positions, boxes or images in the embeddings.
    """

    block: ClassVar[str | tuple[str, ...]] = (
        "BertLayer", "BertGenerationLayer", "BlipTextLayer", "ElectraLayer", "LayoutLMLayer", "MegatronBertLayer",
        "RobertaLayer", "XLMRobertaLayer", "XLMRobertaXLLayer", "CamembertLayer", "RobertaPreLayerNormLayer",
        "Data2VecTextLayer", "RoFormerLayer", "TapasLayer", "VisualBertLayer",
    )  # fmt: skip
    plan = {**ATTENTION, **moved(ATTENTION, "attention", "crossattention"), **MLP}
    optional: ClassVar[tuple[str, ...]] = ("crossattention",)


class BertHeadPolicy(Policy):
    """A dense layer between the blocks and an output head: the masked-language transform, the first token's pooler, or
    the layer before a classifier."""

    block: ClassVar[str | tuple[str, ...]] = (
        "BertPredictionHeadTransform", "BertPooler", "BigBirdPredictionHeadTransform", "BigBirdClassificationHead",
        "BigBirdPegasusClassificationHead", "BlipTextPredictionHeadTransform", "BlipTextPooler",
        "ConvBertGeneratorPredictions", "ConvBertClassificationHead", "ConvBertPredictionHeadTransform", "DeiTPooler",
        "ElectraGeneratorPredictions", "ElectraDiscriminatorPredictions", "ElectraClassificationHead", "IBertPooler",
        "IBertClassificationHead", "LayoutLMPredictionHeadTransform", "LayoutLMPooler", "LEDClassificationHead",
        "LongformerLMHead", "LongformerPooler", "LongformerClassificationHead", "LukeLMHead", "LukePooler",
        "LxmertPredictionHeadTransform", "LxmertPooler", "MegatronBertPredictionHeadTransform", "MegatronBertPooler",
        "MobileBertPredictionHeadTransform", "MobileBertPooler", "MPNetLMHead", "MPNetPooler",
        "MPNetClassificationHead", "ReformerClassificationHead", "RobertaLMHead", "RobertaPooler",
        "RobertaClassificationHead", "XLMRobertaLMHead", "XLMRobertaPooler", "XLMRobertaClassificationHead",
        "XLMRobertaXLLMHead", "XLMRobertaXLPooler", "XLMRobertaXLClassificationHead", "CamembertLMHead",
        "CamembertPooler", "CamembertClassificationHead", "RobertaPreLayerNormLMHead", "RobertaPreLayerNormPooler",
        "RobertaPreLayerNormClassificationHead", "Data2VecTextLMHead", "Data2VecTextPooler",
        "Data2VecTextClassificationHead", "RoFormerPredictionHeadTransform", "RoFormerClassificationHead",
        "SqueezeBertPredictionHeadTransform", "SqueezeBertPooler", "TapasPredictionHeadTransform", "TapasPooler",
        "VisualBertPredictionHeadTransform", "VisualBertPooler",
    )  # fmt: skip
    plan = {"dense": Column(gather=True)}


class BertProjectionPolicy(Policy):
    """The projections beside BERT's blocks: from embeddings or image features of another width, from three
    neighbouring embeddings (MobileBERT), and to the width in which DPR compares questions and passages."""

    block = (
        "ElectraModel", "ConvBertModel", "RoFormerModel", "VisualBertEmbeddings", "MobileBertEmbeddings", "DPREncoder",
    )  # fmt: skip
    optional = ("embeddings_project", "visual_projection", "embedding_transformation", "encode_proj")
    plan = dict.fromkeys(optional, Column(gather=True))
