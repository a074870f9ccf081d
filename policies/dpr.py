from parallelformers_ng.sharding.rules import Column, Policy


class DPRProjectionPolicy(Policy):
    """The projection from BERT's width to the width in which questions and passages are compared. BERT's blocks have
    their own policy."""

    block = "DPREncoder"
    plan = {"encode_proj": Column(gather=True)}
    optional = ("encode_proj",)
