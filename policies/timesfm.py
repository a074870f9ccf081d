from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class TimesFmPolicy(Policy):
    """A decoder over patches of a series; all heads share a scale per column. The blocks at both ends stay whole."""

    block = "TimesFmDecoderLayer"
    plan = {
        **ATTENTION,
        "self_attn": Heads("num_heads"),
        "mlp.gate_proj": Column(),
        "mlp.down_proj": Row(),
    }
