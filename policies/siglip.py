from parallelformers_ng.sharding.rules import Column, Policy, Row


class SiglipPoolingPolicy(Policy):
    """The MLP of the pooling head. The head's attention has one query, uses torch's `MultiheadAttention`, and stays
    whole."""

    block = "SiglipMultiheadAttentionPoolingHead"
    plan = {"mlp.fc1": Column(), "mlp.fc2": Row()}
