from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class TapasPolicy(BertPolicy):
    """BERT's block; rows and columns of the table are in the embeddings."""

    block = "TapasLayer"


class TapasHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("TapasPredictionHeadTransform", "TapasPooler")
