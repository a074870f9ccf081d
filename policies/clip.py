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
    """The MLP of the head that pools image patches. The head's attention stays whole: it has only one query, and uses
    torch's `MultiheadAttention`."""

    block = "SiglipMultiheadAttentionPoolingHead"
    plan = {"mlp.fc1": Column(), "mlp.fc2": Row()}
