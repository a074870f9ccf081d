from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class TimesFmPolicy(Policy):
    """A decoder over patches of a series; all heads share a scale per column. The blocks at both ends stay whole."""

    block = "TimesFmDecoderLayer"
    plan = {
        "self_attn": Heads("num_heads"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.o_proj": Row(),
        "mlp.gate_proj": Column(),
        "mlp.down_proj": Row(),
    }
