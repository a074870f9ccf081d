from __future__ import annotations

from parallelformers_ng.policies.bert import BertPolicy


class BertGenerationPolicy(BertPolicy):
    """BERT's block in an encoder or a decoder, without a pooler and without a transform before the head."""

    block = "BertGenerationLayer"
