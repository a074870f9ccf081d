from parallelformers_ng.policies.bert import BertHeadPolicy, BertPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class ElectraPolicy(BertPolicy):
    """BERT's block in ELECTRA's generator and discriminator."""

    block = "ElectraLayer"


class ElectraHeadPolicy(BertHeadPolicy):
    """The dense layers before the output heads of ELECTRA."""

    block = ("ElectraGeneratorPredictions", "ElectraDiscriminatorPredictions", "ElectraClassificationHead")


class ElectraProjectionPolicy(Policy):
    """The projection from the width of the embeddings to that of the blocks, if these widths differ."""

    block = "ElectraModel"
    plan = {"embeddings_project": Column(gather=True)}
    optional = ("embeddings_project",)
