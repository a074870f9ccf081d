from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


class CLIPPolicy(Policy):
    """The layer of CLIP's text tower and vision tower, and of vision towers like CLIP's."""

    block = (
        "CLIPEncoderLayer", "IdeficsVisionEncoderLayer", "Idefics2EncoderLayer", "Idefics3EncoderLayer",
        "SmolVLMEncoderLayer", "SiglipEncoderLayer", "UnlimitedOcrEncoderLayer",
    )  # fmt: skip
    plan = {**ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class CLIPProjectionPolicy(Policy):
    """The projections from the text tower and the vision tower into their shared space."""

    block = (
        "CLIPModel", "CLIPTextModelWithProjection", "CLIPVisionModelWithProjection", "BlipModel",
    )  # fmt: skip
    plan = {"text_projection": Column(gather=True), "visual_projection": Column(gather=True)}
    optional = ("text_projection", "visual_projection")
