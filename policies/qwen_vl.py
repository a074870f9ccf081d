from typing import ClassVar

from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row

VISION_ATTENTION = {"attn": Heads("num_heads"), "attn.qkv": Column(fused=3), "attn.proj": Row()}


class Qwen2VLVisionPolicy(Policy):
    """The layer of Qwen2-VL's vision tower."""

    block: ClassVar[str | tuple[str, ...]] = "Qwen2VLVisionBlock"
    plan = {**VISION_ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class Qwen25VLVisionPolicy(Qwen2VLVisionPolicy):
    """Qwen2-VL's vision layer with Llama's MLP. Most layers attend to a window of the image."""

    block = ("Qwen2_5_VLVisionBlock", "Glm4vVisionBlock", "Glm4vMoeVisionBlock")
    plan = {**VISION_ATTENTION, **MLP}


class Qwen2VLMergerPolicy(Policy):
    """The merger from four patches of the vision tower to one token of the decoder."""

    block = ("PatchMerger", "Qwen2_5_VLPatchMerger")
    plan = {"mlp.0": Column(), "mlp.2": Row()}


class Qwen3VLVisionPolicy(Policy):
    """The layer of Qwen3-VL's vision tower."""

    block = (
        "Qwen3VLVisionBlock", "Qwen3VLMoeVisionBlock", "Qwen3_5VisionBlock", "Qwen3_5MoeVisionBlock",
    )  # fmt: skip
    plan = {**VISION_ATTENTION, "mlp.linear_fc1": Column(), "mlp.linear_fc2": Row()}


class Qwen3VLMergerPolicy(Policy):
    """The mergers from four patches of the vision tower to one token of the decoder, for its last layer and for earlier
    layers."""

    block = (
        "Qwen3VLVisionPatchMerger", "Qwen3VLMoeVisionPatchMerger", "Qwen3_5VisionPatchMerger",
        "Qwen3_5MoeVisionPatchMerger",
    )  # fmt: skip
    plan = {"linear_fc1": Column(), "linear_fc2": Row()}
