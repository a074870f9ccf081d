from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class TapasPolicy(BertPolicy):
    """BERT's block. The embeddings contain the rows and columns of the table."""

    block = "TapasLayer"


class TapasHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads of TAPAS."""

    block = ("TapasPredictionHeadTransform", "TapasPooler")
