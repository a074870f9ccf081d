from typing import ClassVar

from parallelformers_ng.policies.qwen3_moe import Qwen3MoePolicy
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class Qwen3VLMoePolicy(Qwen3MoePolicy):
    """Qwen3-VL's block with routed experts, or with a plain MLP in some configurations."""

    block = "Qwen3VLMoeTextDecoderLayer"


class Qwen3VLVisionPolicy(Policy):
    """The layer of Qwen3-VL's vision tower."""

    block: ClassVar[str | tuple[str, ...]] = ("Qwen3VLVisionBlock", "Qwen3VLMoeVisionBlock")
    plan = {
        "attn": Heads("num_heads"),
        "attn.qkv": Column(fused=3),
        "attn.proj": Row(),
        "mlp.linear_fc1": Column(),
        "mlp.linear_fc2": Row(),
    }


class Qwen3VLMergerPolicy(Policy):
    """The mergers from four patches of the vision tower to one token of the decoder, for its last layer and for earlier
    layers."""

    block: ClassVar[str | tuple[str, ...]] = ("Qwen3VLVisionPatchMerger", "Qwen3VLMoeVisionPatchMerger")
    plan = {"linear_fc1": Column(), "linear_fc2": Row()}
