"""Models over images and sound, alone or beside text."""

from __future__ import annotations

import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import Case, image_inputs


def vit(heads: int = 6) -> PreTrainedModel:
    config = tf.ViTConfig(
        hidden_size=8 * heads, num_hidden_layers=2, num_attention_heads=heads, intermediate_size=74,
        image_size=16, patch_size=4, num_labels=5,
    )  # fmt: skip
    return build(tf.ViTForImageClassification, config)


CASES = [
    Case("vit", vit, image_inputs),
]
