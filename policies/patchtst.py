from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class PatchTSTPolicy(Policy):
    """An encoder layer over patches of each channel of a time series."""

    block = "PatchTSTEncoderLayer"
    plan = {**ATTENTION, "self_attn": Heads("num_heads"), "ff.0": Column(), "ff.3": Row()}
