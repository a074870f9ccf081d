from typing import ClassVar

from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


class CLIPPolicy(Policy):
    """The layer of CLIP's text tower and vision tower."""

    block: ClassVar[str | tuple[str, ...]] = "CLIPEncoderLayer"
    plan = {**ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class CLIPProjectionPolicy(Policy):
    """The projections from the text tower and the vision tower into their shared space."""

    block: ClassVar[str | tuple[str, ...]] = (
        "CLIPModel",
        "CLIPTextModelWithProjection",
        "CLIPVisionModelWithProjection",
    )
    plan = {"text_projection": Column(gather=True), "visual_projection": Column(gather=True)}
    optional = ("text_projection", "visual_projection")
