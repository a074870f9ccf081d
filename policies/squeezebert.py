from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class SqueezeBertPolicy(Policy):
    """BERT's block with convolutions of one position for its linear layers, most of them in groups of channels.

    The groups of the feed-forward are those of its inputs, so between its two convolutions all channels are gathered.
    """

    block = "SqueezeBertModule"
    plan = {
        "attention": Heads("num_attention_heads", scaled=("all_head_size",), weights="attention_score"),
        "attention.query": Column(),
        "attention.key": Column(),
        "attention.value": Column(),
        "post_attention.conv1d": Row(heads="attention"),
        "intermediate.conv1d": Column(gather=True),
        "output.conv1d": Column(gather=True),
    }


class SqueezeBertHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("SqueezeBertPredictionHeadTransform", "SqueezeBertPooler")
