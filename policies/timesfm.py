from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class TimesFmPolicy(Policy):
    """A decoder over patches of a series; all heads share a scale per column. The blocks at both ends stay whole."""

    block = "TimesFmDecoderLayer"
    plan = {
        **ATTENTION,
        "self_attn": Heads("num_heads"),
        "mlp.gate_proj": Column(),
        "mlp.down_proj": Row(),
    }


class TimesFm25Policy(Policy):
    """The same with rotated positions and a plain MLP."""

    block = "TimesFm2_5DecoderLayer"
    plan = {**ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class TimesFm25ResidualPolicy(Policy):
    """The block at either end, an MLP beside a projection. The last one, from states to quantiles, is most of it."""

    block = "TimesFm2_5ResidualBlock"
    plan = {"input_layer": Column(), "output_layer": Row(), "residual_layer": Column(gather=True)}
