from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


class CLIPPolicy(Policy):
    """The layer of CLIP's text tower and vision tower, and of vision towers like CLIP's."""

    block = (
        "CLIPEncoderLayer", "IdeficsVisionEncoderLayer", "Idefics2EncoderLayer", "Idefics3EncoderLayer",
        "SmolVLMEncoderLayer", "SiglipEncoderLayer", "UnlimitedOcrEncoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class SiglipPoolingPolicy(Policy):
    """The MLP of the pooling head. The head's attention has one query, uses torch's `MultiheadAttention`, and stays
    whole."""

    block = "SiglipMultiheadAttentionPoolingHead"
    plan = {"mlp.fc1": Column(), "mlp.fc2": Row()}
