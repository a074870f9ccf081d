from parallelformers_ng.policies.llama import ATTENTION
from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class TimesFmPolicy(Policy):
    """A decoder layer over patches of a time series. All heads share a scale per column. The residual blocks before and
    after the decoder stay whole."""

    block = "TimesFmDecoderLayer"
    plan = {**ATTENTION, "self_attn": Heads("num_heads"), "mlp.gate_proj": Column(), "mlp.down_proj": Row()}


class TimesFm25Policy(Policy):
    """TimesFM's decoder layer with rotary positions and a plain MLP."""

    block = "TimesFm2_5DecoderLayer"
    plan = {**ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class TimesFm25ResidualPolicy(Policy):
    """The residual blocks before and after the decoder: an MLP beside a projection. The last block, from states to
    quantiles, has most of the weights."""

    block = "TimesFm2_5ResidualBlock"
    plan = {"input_layer": Column(), "output_layer": Row(), "residual_layer": Column(gather=True)}
