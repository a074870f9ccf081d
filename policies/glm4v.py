from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.policies.qwen2_vl import Qwen25VLVisionPolicy
from parallelformers_ng.sharding.rules import Column, Policy, moved


class Glm4vVisionPolicy(Qwen25VLVisionPolicy):
    """The layer of the vision tower of GLM 4.1V and 4.5V, which is Qwen 2.5 VL's; their decoders are those of GLM."""

    block = ("Glm4vVisionBlock", "Glm4vMoeVisionBlock")


class Glm4vMergerPolicy(Policy):
    """From the tower to the decoder."""

    block = ("Glm4vVisionPatchMerger", "Glm4vMoeVisionPatchMerger")
    plan = {"proj": Column(gather=True), **moved(MLP, "mlp", "")}
