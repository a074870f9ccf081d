from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.policies.qwen2_vl import Qwen25VLVisionPolicy
from parallelformers_ng.sharding.rules import Column, Policy, moved


class Glm4vVisionPolicy(Qwen25VLVisionPolicy):
    """Qwen 2.5 VL's vision layer, in the vision towers of GLM 4.1V and 4.5V. Policies of GLM cut the decoders."""

    block = ("Glm4vVisionBlock", "Glm4vMoeVisionBlock")


class Glm4vMergerPolicy(Policy):
    """The layers between the vision tower and the decoder."""

    block = ("Glm4vVisionPatchMerger", "Glm4vMoeVisionPatchMerger")
    plan = {"proj": Column(gather=True), **moved(MLP, "mlp", "")}
