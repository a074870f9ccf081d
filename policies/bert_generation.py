from __future__ import annotations

from parallelformers_ng.policies.bert import BertPolicy


class BertGenerationPolicy(BertPolicy):
    """BERT's block, as encoder or decoder, without poolers and heads' transforms."""

    block = "BertGenerationLayer"
