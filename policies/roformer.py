from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.policies.electra import ElectraProjectionPolicy


class RoFormerPolicy(BertPolicy):
    """BERT's block with rotary positions, which all heads share."""

    block = "RoFormerLayer"


class RoFormerHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("RoFormerPredictionHeadTransform", "RoFormerClassificationHead")


class RoFormerProjectionPolicy(ElectraProjectionPolicy):
    """From the width of the embeddings to that of the blocks, if they differ."""

    block = "RoFormerModel"
