from __future__ import annotations

from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Renewed


class BigBirdPolicy(BertPolicy):
    """BERT's block with attention to blocks of the sequence. On a short sequence the model changes to full attention;
    the random blocks are drawn in training alone."""

    block = "BigBirdLayer"
    plan = {**BertPolicy.plan, "attention": Renewed("self")}


class BigBirdHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("BigBirdPredictionHeadTransform", "BigBirdClassificationHead")


class BigBirdPoolerPolicy(Policy):
    """The pooler of the first token."""

    block = "BigBirdModel"
    plan = {"pooler": Column(gather=True)}
    optional = ("pooler",)
