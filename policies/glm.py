from parallelformers_ng.policies.llama import ATTENTION, MLP, LlamaPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Row, moved


class GlmPolicy(LlamaPolicy):
    """Llama's block with biases, partial rotary positions, and gate and up side by side. GLM 4 has more norms."""

    block = ("GlmDecoderLayer", "Glm4DecoderLayer", "Glm4vTextDecoderLayer")
    plan = {**ATTENTION, "mlp.gate_up_proj": Column(fused=2), "mlp.down_proj": Row()}


class Glm4vMergerPolicy(Policy):
    """The layers between the vision tower and the decoder."""

    block = ("Glm4vVisionPatchMerger", "Glm4vMoeVisionPatchMerger")
    plan = {"proj": Column(gather=True), **moved(MLP, "mlp", "")}
