from parallelformers_ng.policies.qwen3_next import DELTA_NET, KEY, VALUE, Qwen3NextMoEPolicy, Qwen3NextPolicy
from parallelformers_ng.policies.qwen3_vl import Qwen3VLMergerPolicy, Qwen3VLVisionPolicy
from parallelformers_ng.sharding.rules import Column, Policy


class Qwen35Policy(Qwen3NextPolicy):
    """Qwen3-Next's block in Qwen3.5."""

    block = ("Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer")


class Qwen35DeltaNetPolicy(Policy):
    """Qwen3-Next's delta net with q, k and v packed side by side, and separate projections of gates."""

    block = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
    plan = {
        **DELTA_NET,
        "in_proj_qkv": Column(fused=(KEY, KEY, VALUE)),
        "in_proj_z": Column(),
        "in_proj_b": Column(),
        "in_proj_a": Column(),
    }


class Qwen35MoEPolicy(Qwen3NextMoEPolicy):
    """Qwen3-Next's experts in Qwen3.5."""

    block = "Qwen3_5MoeSparseMoeBlock"


class Qwen35VisionPolicy(Qwen3VLVisionPolicy):
    """The layer of Qwen3-VL's vision tower."""

    block = ("Qwen3_5VisionBlock", "Qwen3_5MoeVisionBlock")


class Qwen35MergerPolicy(Qwen3VLMergerPolicy):
    """The merger of Qwen3-VL's vision tower."""

    block = ("Qwen3_5VisionPatchMerger", "Qwen3_5MoeVisionPatchMerger")
