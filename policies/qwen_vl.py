from parallelformers_ng.policies.llama import MLP
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row

VISION_ATTENTION = {"attn": Heads("num_heads"), "attn.qkv": Column(fused=3), "attn.proj": Row()}


class QwenVLVisionPolicy(Policy):
    """The layer of a Qwen-VL vision tower. Qwen2.5-VL has Llama's MLP, and most of its layers attend to a window of the
    image."""

    block = (
        "Qwen2VLVisionBlock", "Qwen2_5_VLVisionBlock", "Glm4vVisionBlock", "Glm4vMoeVisionBlock", "Qwen3VLVisionBlock",
        "Qwen3VLMoeVisionBlock", "Qwen3_5VisionBlock", "Qwen3_5MoeVisionBlock",
    )  # fmt: skip
    plan = {**VISION_ATTENTION, **MLP, "mlp.{fc1,linear_fc1}": Column(), "mlp.{fc2,linear_fc2}": Row()}
    optional = ("mlp",)


class QwenVLMergerPolicy(Policy):
    """The merger from four patches of the vision tower to one token of the decoder. Qwen3-VL has such mergers also for
    earlier layers of the tower."""

    block = (
        "PatchMerger", "Qwen2_5_VLPatchMerger", "Qwen3VLVisionPatchMerger", "Qwen3VLMoeVisionPatchMerger",
        "Qwen3_5VisionPatchMerger", "Qwen3_5MoeVisionPatchMerger",
    )  # fmt: skip
    plan = {"{mlp.0,linear_fc1}": Column(), "{mlp.2,linear_fc2}": Row()}
    optional = ("mlp", "linear_fc1", "linear_fc2")
