from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row, moved


class Glm4vVisionPolicy(Policy):
    """The layer of the vision tower of GLM 4.1V and 4.5V; their decoders are those of GLM."""

    block = ("Glm4vVisionBlock", "Glm4vMoeVisionBlock")
    plan = {"attn": Heads("num_heads"), "attn.qkv": Column(fused=3), "attn.proj": Row(), **MLP}


class Glm4vMergerPolicy(Policy):
    """From the tower to the decoder."""

    block = ("Glm4vVisionPatchMerger", "Glm4vMoeVisionPatchMerger")
    plan = {"proj": Column(gather=True), **moved(MLP, "mlp", "")}
