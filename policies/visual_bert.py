from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class VisualBertPolicy(BertPolicy):
    """BERT's block over words and regions of an image. The region-to-phrase attention has one head and stays whole."""

    block = "VisualBertLayer"


class VisualBertProjectionPolicy(Policy):
    """From the width of the image's features to that of the blocks."""

    block = "VisualBertEmbeddings"
    plan = {"visual_projection": Column(gather=True)}


class VisualBertHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("VisualBertPredictionHeadTransform", "VisualBertPooler")
