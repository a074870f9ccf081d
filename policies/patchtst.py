from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row


class PatchTSTPolicy(Policy):
    """An encoder layer over patches of each channel of a time series."""

    block = "PatchTSTEncoderLayer"
    plan = {
        "self_attn": Heads("num_heads"),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.out_proj": Row(),
        "ff.0": Column(),
        "ff.3": Row(),
    }
