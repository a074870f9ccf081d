from parallelformers_ng.policies.bert import ATTENTION, MLP, BertPolicy
from parallelformers_ng.sharding.rules import Column, Gather, Policy, Slice


class MobileBertPolicy(BertPolicy):
    """BERT's block between bottlenecks, with several feed-forwards one after another.

    A bottleneck's output is also the residual of the next layers, so each rank needs the whole output.
    """

    block = "MobileBertLayer"
    plan = {
        **ATTENTION,
        **MLP,
        "bottleneck.{input,attention}.dense": Column(gather=True),
        "output.bottleneck.dense": Column(gather=True),
    }
    optional = ("bottleneck", "output.bottleneck")


class MobileBertFeedForwardPolicy(Policy):
    """All feed-forwards of a MobileBERT block except the last."""

    block = "mobilebert.FFNLayer"
    plan = MLP


class MobileBertLMHeadPolicy(Policy):
    """The output head, which multiplies by the weights of `dense` and `decoder` (the embeddings) without calling these
    layers. The weights of `dense` and `decoder` are cut by the vocabulary."""

    block = "MobileBertLMPredictionHead"
    plan = {"": Gather("decoder"), "dense.weight": Slice(1)}
