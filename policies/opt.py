from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


class OPTPolicy(Policy):
    """OPT's block. `num_heads` is set per rank, because the forward views q as `(batch, -1, num_heads, head_dim)`. With
    the whole number of heads, `-1` would become a wrong length."""

    block = "OPTDecoderLayer"
    plan = {**ATTENTION, "fc1": Column(), "fc2": Row()}
