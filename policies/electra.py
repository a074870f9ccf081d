from parallelformers_ng.sharding.rules import Column, Policy


class ElectraProjectionPolicy(Policy):
    """The projection from the width of the embeddings to that of the blocks, if these widths differ."""

    block = ("ElectraModel", "ConvBertModel", "RoFormerModel")
    plan = {"embeddings_project": Column(gather=True)}
    optional = ("embeddings_project",)
