from typing import ClassVar

from parallelformers_ng.policies.bart import ATTENTION
from parallelformers_ng.sharding.rules import Column, Policy, Row


class CLIPPolicy(Policy):
    """The layer of both towers, text and vision."""

    block: ClassVar[str | tuple[str, ...]] = "CLIPEncoderLayer"
    plan = {**ATTENTION, "mlp.fc1": Column(), "mlp.fc2": Row()}


class CLIPProjectionPolicy(Policy):
    """From each tower into the space that they share."""

    block: ClassVar[str | tuple[str, ...]] = (
        "CLIPModel",
        "CLIPTextModelWithProjection",
        "CLIPVisionModelWithProjection",
    )
    plan = {"text_projection": Column(gather=True), "visual_projection": Column(gather=True)}
    optional = ("text_projection", "visual_projection")
