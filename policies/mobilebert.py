from __future__ import annotations

from parallelformers_ng.policies.bert import ATTENTION, MLP, BertHeadPolicy, BertPolicy
from parallelformers_ng.sharding.rules import Column, Gather, Policy, Row, Slice


class MobileBertPolicy(BertPolicy):
    """BERT's block between bottlenecks, with several feed-forwards one after another.

    A bottleneck's result is the residual of what follows, so each rank needs all of it.
    """

    block = "MobileBertLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "bottleneck.input.dense": Column(gather=True),
        "bottleneck.attention.dense": Column(gather=True),
        "output.bottleneck.dense": Column(gather=True),
    }
    optional = ("bottleneck", "output.bottleneck")


class MobileBertFeedForwardPolicy(Policy):
    """The feed-forwards in front of the block's last."""

    block = "mobilebert.FFNLayer"
    plan = {"intermediate.dense": Column(), "output.dense": Row()}


class MobileBertEmbeddingPolicy(Policy):
    """From three neighbouring embeddings to the width of the blocks."""

    block = "MobileBertEmbeddings"
    plan = {"embedding_transformation": Column(gather=True)}


class MobileBertHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("MobileBertPredictionHeadTransform", "MobileBertPooler")


class MobileBertLMHeadPolicy(Policy):
    """The head multiplies with the weights of `dense` and of `decoder` (the embeddings) at once, past both layers.
    Both are cut by the vocabulary."""

    block = "MobileBertLMPredictionHead"
    plan = {"": Gather("decoder"), "dense.weight": Slice(1)}
