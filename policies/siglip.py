from parallelformers_ng.policies.clip import CLIPPolicy
from parallelformers_ng.sharding.rules import Column, Policy, Row


class SiglipPolicy(CLIPPolicy):
    """CLIP's layer under another name; the vision tower of Gemma 3."""

    block = "SiglipEncoderLayer"


class SiglipPoolingPolicy(Policy):
    """The pooling head's MLP. Its attention is one query of torch's own `MultiheadAttention` and stays whole."""

    block = "SiglipMultiheadAttentionPoolingHead"
    plan = {"mlp.fc1": Column(), "mlp.fc2": Row()}


class SiglipProjectionPolicy(Policy):
    """From the text tower into the space that both towers share."""

    block = ("SiglipTextModel", "SiglipTextTransformer")
    plan = {"head": Column(gather=True)}
