from parallelformers_ng.sharding.rules import Column, Policy, Row


class RwkvAttentionPolicy(Policy):
    """The model makes the state of all channels for all layers, so the recurrence runs whole on gathered inputs."""

    block = "RwkvSelfAttention"
    plan = {
        "key": Column(gather=True),
        "value": Column(gather=True),
        "receptance": Column(gather=True),
        "output": Column(gather=True),
    }


class RwkvFeedForwardPolicy(Policy):
    """The channel mixing, whose output a gate of the hidden state's width is multiplied with."""

    block = "RwkvFeedForward"
    plan = {"key": Column(), "value": Row(), "receptance": Column(gather=True)}
