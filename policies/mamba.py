from parallelformers_ng.sharding.rules import Column, Heads, Norm, Part, Policy, Row, Slice


class MambaPolicy(Policy):
    """A selective state-space mixer: every channel has its own recurrence.

    `x_proj` computes time step, B and C from all channels, so its outputs are summed over the ranks.
    """

    block = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
    plan = {
        "": Heads("intermediate_size"),
        "in_proj": Column(fused=2),
        "conv1d": Column(),
        "x_proj": Row(),
        "dt_proj": Column(),
        "A_log": Slice(0),
        "D": Slice(0),
        "out_proj": Row(),
    }


INNER = Part("query", "head_dim")
STATE = Part("key", "ssm_state_size")
TIME_STEP = Part("query", 1)


class Mamba2Policy(Policy):
    """A state-space mixer with heads. Heads of a group share B and C, as query heads share a key/value head.

    `in_proj` packs gate, x, B, C and time step. The gated norm is over the channels of a group, or over all channels.
    """

    block = (
        "Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "Zamba2MambaMixer",
    )  # fmt: skip
    plan = {
        "": Heads("num_heads", "n_groups", scaled=("intermediate_size",)),
        "in_proj": Column(fused=(INNER, INNER, STATE, STATE, TIME_STEP)),
        "conv1d": Column(fused=(INNER, STATE, STATE), widths=("conv_dim",)),
        **dict.fromkeys(("A_log", "D", "dt_bias"), Slice(0)),
        "norm": Norm(),
        "out_proj": Row(),
    }
