from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class VisualBertPolicy(BertPolicy):
    """BERT's block over words and image regions. The region-to-phrase attention has one head and stays whole."""

    block = "VisualBertLayer"


class VisualBertProjectionPolicy(Policy):
    """The projection from the width of the image features to that of the blocks."""

    block = "VisualBertEmbeddings"
    plan = {"visual_projection": Column(gather=True)}


class VisualBertHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads of VisualBERT."""

    block = ("VisualBertPredictionHeadTransform", "VisualBertPooler")
