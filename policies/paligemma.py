from parallelformers_ng.sharding.rules import Column, Policy


class PaliGemmaPolicy(Policy):
    """Between SigLIP and Gemma, which have policies of their own."""

    block = "PaliGemmaMultiModalProjector"
    plan = {"linear": Column(gather=True)}
