from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class MegatronBertPolicy(BertPolicy):
    """BERT's block with norms before attention and feed-forward."""

    block = "MegatronBertLayer"


class MegatronBertHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads of Megatron-BERT."""

    block = ("MegatronBertPredictionHeadTransform", "MegatronBertPooler")
