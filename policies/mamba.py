from parallelformers_ng.sharding.rules import Column, Heads, Policy, Row, Slice


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
