from parallelformers_ng.sharding.rules import Column, Policy


class VisualBertProjectionPolicy(Policy):
    """The projection from the width of the image features to that of the blocks."""

    block = "VisualBertEmbeddings"
    plan = {"visual_projection": Column(gather=True)}
