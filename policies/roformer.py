from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.policies.electra import ElectraProjectionPolicy


class RoFormerPolicy(BertPolicy):
    """BERT's block with rotary positions, which are the same for all heads."""

    block = "RoFormerLayer"


class RoFormerHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads of RoFormer."""

    block = ("RoFormerPredictionHeadTransform", "RoFormerClassificationHead")


class RoFormerProjectionPolicy(ElectraProjectionPolicy):
    """The projection from the width of the embeddings to that of the blocks, if these widths differ."""

    block = "RoFormerModel"
