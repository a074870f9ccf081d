from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class LayoutLMPolicy(BertPolicy):
    """BERT's block. The embeddings contain the boxes of the words."""

    block = "LayoutLMLayer"


class LayoutLMHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads of LayoutLM."""

    block = ("LayoutLMPredictionHeadTransform", "LayoutLMPooler")
