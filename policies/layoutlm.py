from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class LayoutLMPolicy(BertPolicy):
    """BERT's block; the boxes of the words are in the embeddings."""

    block = "LayoutLMLayer"


class LayoutLMHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("LayoutLMPredictionHeadTransform", "LayoutLMPooler")
