from parallelformers_ng.sharding.rules import Column, Policy, Row


class RwkvAttentionPolicy(Policy):
    """RWKV's time mixing. The model makes one state of all channels for all layers, so each rank computes the whole
    recurrence on gathered inputs."""

    block = "RwkvSelfAttention"
    plan = {"{key,value,receptance,output}": Column(gather=True)}


class RwkvFeedForwardPolicy(Policy):
    """RWKV's channel mixing. A gate as wide as the hidden state multiplies its output."""

    block = "RwkvFeedForward"
    plan = {"key": Column(), "value": Row(), "receptance": Column(gather=True)}
