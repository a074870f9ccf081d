from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Policy, moved


class Glm4vMergerPolicy(Policy):
    """The layers between the vision tower and the decoder."""

    block = ("Glm4vVisionPatchMerger", "Glm4vMoeVisionPatchMerger")
    plan = {"proj": Column(gather=True), **moved(MLP, "mlp", "")}
