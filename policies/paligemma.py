from parallelformers_ng.sharding.rules import Column, Policy


class PaliGemmaPolicy(Policy):
    """The projection between SigLIP and Gemma, which have their own policies."""

    block = "PaliGemmaMultiModalProjector"
    plan = {"linear": Column(gather=True)}
