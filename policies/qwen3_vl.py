from parallelformers_ng.policies.qwen2_vl import VISION_ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


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
