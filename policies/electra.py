from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class ElectraPolicy(BertPolicy):
    """BERT's block, in the generator and the discriminator."""

    block = "ElectraLayer"


class ElectraHeadPolicy(BertHeadPolicy):
    """The layers in front of the heads."""

    block = ("ElectraGeneratorPredictions", "ElectraDiscriminatorPredictions", "ElectraClassificationHead")


class ElectraProjectionPolicy(Policy):
    """From the width of the embeddings to that of the blocks, if they differ."""

    block = "ElectraModel"
    plan = {"embeddings_project": Column(gather=True)}
    optional = ("embeddings_project",)
