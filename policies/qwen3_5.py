from parallelformers_ng.policies.qwen3_next import DELTA_NET, KEY, VALUE
from parallelformers_ng.sharding.rules import Column, Policy


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
