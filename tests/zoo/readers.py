"""Makes tiny text decoders that read images."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, image_inputs, token_ids
from tests.zoo.decoders import SPECIAL_IDS
from tests.zoo.recent import DELTA_NET, LLAMA4
from tests.zoo.vision_audio import IMAGE_TOKEN, IMAGES, TOWER

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 74, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 64, **SPECIAL_IDS,
}  # fmt: skip
VISION = {**TOWER, **IMAGES}
ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}


def reader(family: str, text: dict[str, Any], vision: dict[str, Any], **options: Any) -> PreTrainedModel:
    """Return a decoder of `family` with a vision tower."""
    settings = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, **SPECIAL_IDS, **options}
    config = getattr(tf, f"{family}Config")(text_config={**TEXT, **text}, vision_config=vision, **settings)
    return build(getattr(tf, f"{family}ForConditionalGeneration"), config)


def image_text_inputs(count: int, rows: int = 2, size: int = 16, **more: Any) -> dict[str, Any]:
    """Return rows of text with the `count` tokens of one image each."""
    ids = torch.cat([token_ids(rows, 3), torch.full((rows, count), IMAGE_TOKEN), token_ids(rows, 4, seed=2)], dim=1)
    ids[ids == VOCABULARY - 1] = IMAGE_TOKEN - 1
    ids[:, 3 : 3 + count] = IMAGE_TOKEN
    images = {"pixel_values": torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(3))}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images, **more}


def patch_inputs(channels: int, temporal: int = 2, patch: int = 4) -> dict[str, Any]:
    """Return one image per row, as a flat list of four by four patches; four patches make a token."""
    inputs = image_text_inputs(4)
    flat = torch.randn(32, channels * temporal * patch * patch, generator=torch.Generator().manual_seed(3))
    kinds = (inputs["input_ids"] == IMAGE_TOKEN).long()
    return {**inputs, "pixel_values": flat, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2), "mm_token_type_ids": kinds}


QWEN_IDS = {"video_token_id": 129, "vision_start_token_id": 128, "vision_end_token_id": 127}
QWEN_VISION = {
    "depth": 2, "hidden_size": 48, "num_heads": 6, "in_channels": 3, "patch_size": 4, "intermediate_size": 74,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 48,
}  # fmt: skip


def qwen_reader(family: str, text: dict[str, Any] | None = None, **vision: Any) -> PreTrainedModel:
    return reader(family, {"rope_parameters": ROTARY, **(text or {})}, {**QWEN_VISION, **vision}, **QWEN_IDS)


def llava(family: str = "Llava", **options: Any) -> PreTrainedModel:
    vision = {**VISION, "model_type": "clip_vision_model"}
    return reader(family, {"model_type": "llama"}, vision, image_seq_length=16, **options)


def blip_2() -> PreTrainedModel:
    config = tf.Blip2Config(
        vision_config={**VISION, "num_attention_heads": 4},
        qformer_config={**TOWER, "vocab_size": VOCABULARY, "encoder_hidden_size": 48},
        text_config={
            "model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 40, "num_hidden_layers": 2, "ffn_dim": 74,
            "num_attention_heads": 5, "max_position_embeddings": 64, "word_embed_proj_dim": 40, **SPECIAL_IDS,
        },
        num_query_tokens=4, image_token_index=IMAGE_TOKEN, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.Blip2ForConditionalGeneration, config)


def blip() -> PreTrainedModel:
    text = {
        **TOWER, "vocab_size": VOCABULARY, "encoder_hidden_size": 48, "max_position_embeddings": 64, **SPECIAL_IDS,
        "sep_token_id": 2,
    }  # fmt: skip
    config = tf.BlipConfig(text_config=text, vision_config={**VISION, "num_attention_heads": 4}, projection_dim=22)
    return build(tf.BlipForConditionalGeneration, config, attention="eager")


def pixtral_reader() -> PreTrainedModel:
    vision = {**VISION, "model_type": "pixtral", "head_dim": 8, "rope_theta": 10000.0}
    return reader("Mistral3", {"model_type": "mistral"}, vision, spatial_merge_size=2, projector_hidden_act="gelu")


def llama4_reader() -> PreTrainedModel:
    vision = {
        **VISION, "vision_output_dim": 40, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 40,
        "projector_output_dim": 40, "intermediate_size": 192,
    }  # fmt: skip
    return reader("Llama4", {**LLAMA4, "intermediate_size": 40}, vision)


def idefics(family: str, **options: Any) -> PreTrainedModel:
    text = {"model_type": "mistral" if family == "Idefics2" else "llama", **SPECIAL_IDS}
    return reader(family, text, VISION, **options)


def idefics_1() -> PreTrainedModel:
    text = {name: value for name, value in TEXT.items() if name not in ("num_key_value_heads", "head_dim")}
    vision = {**IMAGES, "embed_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 5, "intermediate_size": 74}
    text["intermediate_size"] = 196  # so that the replicated head is as small a part as in a real model
    config = tf.IdeficsConfig(
        **text, vision_config=vision, perceiver_config={}, use_resampler=False, additional_vocab_size=2,
        cross_layer_interval=1,
    )  # fmt: skip
    return build(tf.IdeficsForVisionText2Text, config)


def idefics_1_inputs() -> dict[str, Any]:
    """Return rows in which the third token and all later tokens attend to an image."""
    seen = torch.zeros(2, 7, 1, dtype=torch.long)
    seen[:, 2:] = 1
    return {**several_images(0), "input_ids": token_ids(), "attention_mask": torch.ones(2, 7, dtype=torch.long),
            "image_attention_mask": seen}  # fmt: skip


def several_images(count: int) -> dict[str, Any]:
    inputs = image_text_inputs(count)
    return {**inputs, "pixel_values": inputs["pixel_values"].unsqueeze(1)}


DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
NORMED = {**VISION, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True, "norm_type": "rms_norm"}
SIGLIP = {**VISION, "projection_dim": 48, "vision_use_head": False}
RESAMPLER = {
    "hidden_size": 48, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 6, "resampler_head_dim": 8,
    "num_key_value_heads": 3,
}  # fmt: skip

READERS = {
    "llava": (llava, lambda: image_text_inputs(16)),
    "paligemma": (
        lambda: reader("PaliGemma", {"model_type": "gemma"}, SIGLIP, projection_dim=48),
        lambda: image_text_inputs(16),
    ),
    "internvl": (lambda: reader("InternVL", {"model_type": "qwen2"}, NORMED), lambda: image_text_inputs(4)),
    "mistral3": (pixtral_reader, lambda: image_text_inputs(4, image_sizes=torch.tensor([[16, 16]] * 2))),
    "qwen2-vl": (lambda: qwen_reader("Qwen2VL", embed_dim=48, mlp_ratio=2), lambda: patch_inputs(3)),
    "qwen2-5-vl": (
        lambda: qwen_reader("Qwen2_5_VL", window_size=8, fullatt_block_indexes=[1]),
        lambda: patch_inputs(3),
    ),
    "qwen3-vl": (lambda: qwen_reader("Qwen3VL", **DEEPSTACK), lambda: patch_inputs(3)),
    "qwen3-vl-moe": (lambda: qwen_reader("Qwen3VLMoe", MIXTURE, **DEEPSTACK), lambda: patch_inputs(3)),
    "qwen3-5-images": (lambda: qwen_reader("Qwen3_5", DELTA_NET, num_position_embeddings=16), lambda: patch_inputs(3)),
    "glm4v": (
        lambda: qwen_reader("Glm4v", {"rope_parameters": {**ROTARY, "partial_rotary_factor": 1.0}}, image_size=16),
        lambda: patch_inputs(3),
    ),
    "llama4-images": (llama4_reader, lambda: image_text_inputs(4)),
    "idefics": (idefics_1, idefics_1_inputs),
    "idefics2": (lambda: idefics("Idefics2", perceiver_config=RESAMPLER), lambda: several_images(4)),
    "idefics3": (lambda: idefics("Idefics3", scale_factor=2), lambda: several_images(4)),
    "smolvlm": (lambda: idefics("SmolVLM", scale_factor=2), lambda: several_images(4)),
    "blip": (blip, lambda: {**image_inputs(), "input_ids": token_ids()}),
    "blip-2": (blip_2, lambda: image_text_inputs(4)),
}
if tf.__version__ == "5.24.0":  # this release reads `image_outputs`, which its language model lacks
    del READERS["llama4-images"]
CASES = [Case(name, make, inputs, generates=True) for name, (make, inputs) in READERS.items()]
