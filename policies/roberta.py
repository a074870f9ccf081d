from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class RobertaPolicy(BertPolicy):
    """BERT's block in RoBERTa and its successors."""

    block = (
        "RobertaLayer", "XLMRobertaLayer", "XLMRobertaXLLayer", "CamembertLayer", "RobertaPreLayerNormLayer",
        "Data2VecTextLayer",
    )  # fmt: skip


class RobertaHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads: for masked language, for classification, and the pooler."""

    block = (
        "RobertaLMHead", "RobertaPooler", "RobertaClassificationHead",
        "XLMRobertaLMHead", "XLMRobertaPooler", "XLMRobertaClassificationHead",
        "XLMRobertaXLLMHead", "XLMRobertaXLPooler", "XLMRobertaXLClassificationHead",
        "CamembertLMHead", "CamembertPooler", "CamembertClassificationHead",
        "RobertaPreLayerNormLMHead", "RobertaPreLayerNormPooler", "RobertaPreLayerNormClassificationHead",
        "Data2VecTextLMHead", "Data2VecTextPooler", "Data2VecTextClassificationHead",
    )  # fmt: skip
