from typing import ClassVar

from parallelformers_ng.sharding.policy import Column, Heads, Policy, Row


class CLIPPolicy(Policy):
    """The layer of both towers, text and vision."""

    block: ClassVar[str | tuple[str, ...]] = "CLIPEncoderLayer"
    plan = {
        "self_attn": Heads("num_heads", scaled=("embed_dim",)),
        "self_attn.q_proj": Column(),
        "self_attn.k_proj": Column(),
        "self_attn.v_proj": Column(),
        "self_attn.out_proj": Row(),
        "mlp.fc1": Column(),
        "mlp.fc2": Row(),
    }


class CLIPProjectionPolicy(Policy):
    """From each tower into the space that they share."""

    block: ClassVar[str | tuple[str, ...]] = (
        "CLIPModel",
        "CLIPTextModelWithProjection",
        "CLIPVisionModelWithProjection",
    )
    plan = {"text_projection": Column(gather=True), "visual_projection": Column(gather=True)}
    optional = ("text_projection", "visual_projection")
