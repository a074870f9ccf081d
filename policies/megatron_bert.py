from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy


class MegatronBertPolicy(BertPolicy):
    """BERT's block with the norms in front."""

    block = "MegatronBertLayer"


class MegatronBertHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("MegatronBertPredictionHeadTransform", "MegatronBertPooler")
