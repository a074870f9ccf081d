"""Decoders that read images, and models over images or sound of the newer kinds."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, image_inputs, seq2seq_inputs, token_ids
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
    """A decoder of `family` behind a vision tower."""
    settings = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN, **SPECIAL_IDS, **options}
    config = getattr(tf, f"{family}Config")(text_config={**TEXT, **text}, vision_config=vision, **settings)
    return build(getattr(tf, f"{family}ForConditionalGeneration"), config)


def image_text_inputs(count: int, rows: int = 2, size: int = 16, **more: Any) -> dict[str, Any]:
    """Each row of text holds the `count` tokens of one image."""
    ids = torch.cat([token_ids(rows, 3), torch.full((rows, count), IMAGE_TOKEN), token_ids(rows, 4, seed=2)], dim=1)
    ids[ids == VOCABULARY - 1] = IMAGE_TOKEN - 1
    ids[:, 3 : 3 + count] = IMAGE_TOKEN
    images = {"pixel_values": torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(3))}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images, **more}


def patch_inputs(channels: int, temporal: int = 2, patch: int = 4) -> dict[str, Any]:
    """One image of four by four patches for each row, laid out flat; four of them make a token."""
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
    text["intermediate_size"] = 196  # so that the head, which stays whole, weighs as little as it does
    config = tf.IdeficsConfig(
        **text, vision_config=vision, perceiver_config={}, use_resampler=False, additional_vocab_size=2,
        cross_layer_interval=1,
    )  # fmt: skip
    return build(tf.IdeficsForVisionText2Text, config)


def idefics_1_inputs() -> dict[str, Any]:
    """Each row looks at one image from its third token on."""
    seen = torch.zeros(2, 7, 1, dtype=torch.long)
    seen[:, 2:] = 1
    return {**several_images(0), "input_ids": token_ids(), "attention_mask": torch.ones(2, 7, dtype=torch.long),
            "image_attention_mask": seen}  # fmt: skip


def several_images(count: int) -> dict[str, Any]:
    inputs = image_text_inputs(count)
    return {**inputs, "pixel_values": inputs["pixel_values"].unsqueeze(1)}


def grounding_dino() -> PreTrainedModel:
    backbone = {
        "model_type": "swin", "embed_dim": 12, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 4], "window_size": 2,
        "image_size": 64, "patch_size": 4, "out_indices": [2, 3, 4],
    }  # fmt: skip
    text = {
        **TOWER, "model_type": "bert", "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip
    config = tf.GroundingDinoConfig(
        backbone_config=backbone, text_config=text, d_model=64, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=80,
        decoder_ffn_dim=74, encoder_attention_heads=8, decoder_attention_heads=8, num_queries=10, max_text_len=16,
        num_feature_levels=3,
    )  # fmt: skip
    return build(tf.GroundingDinoForObjectDetection, config, attention="eager")


def sam() -> PreTrainedModel:
    decoder = {
        "hidden_size": 32, "mlp_dim": 74, "num_attention_heads": 4, "iou_head_hidden_dim": 32,
        "attention_downsample_rate": 2,
    }  # fmt: skip
    vision = {
        **VISION,
        "output_channels": 32,
        "window_size": 2,
        "global_attn_indexes": [1],
        "mlp_dim": 74,
        "num_pos_feats": 16,
    }
    prompts = {"hidden_size": 32, "mask_input_channels": 16, **IMAGES}
    config = tf.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    return build(tf.SamModel, config, attention="eager")


def sam_inputs() -> dict[str, Any]:
    return {**image_inputs(), "input_points": torch.tensor([[[[3.0, 5.0]]], [[[9.0, 2.0]]]])}


def moonshine() -> PreTrainedModel:
    config = tf.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=74, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=6, decoder_num_attention_heads=6,
        max_position_embeddings=64, **SPECIAL_IDS,
    )  # fmt: skip
    return build(tf.MoonshineForConditionalGeneration, config)


def moonshine_inputs() -> dict[str, Any]:
    sound = torch.randn(2, 2000, generator=torch.Generator().manual_seed(5))
    return {"input_values": sound, "decoder_input_ids": token_ids(length=4, seed=2)}


def seamless(family: str = "SeamlessM4T", head: str = "ForTextToText") -> PreTrainedModel:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder", "t2u_encoder", "t2u_decoder")
        for name, value in {"layers": 2, "ffn_dim": 74, "attention_heads": 6}.items()
    }
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, t2u_vocab_size=40, hidden_size=48, **sides, speech_encoder_layers=2,
        speech_encoder_attention_heads=6, speech_encoder_intermediate_size=74, feature_projection_input_dim=20,
        max_position_embeddings=64, adaptor_kernel_size=4, adaptor_stride=2, conv_depthwise_kernel_size=5,
        max_source_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    return build(getattr(tf, family + head), config)


def speech_inputs() -> dict[str, Any]:
    features = torch.randn(2, 16, 20, generator=torch.Generator().manual_seed(4))
    return {"input_features": features, "decoder_input_ids": token_ids(length=4, seed=2)}


def musicgen() -> PreTrainedModel:
    config = tf.MusicgenDecoderConfig(
        vocab_size=40, max_position_embeddings=64, num_hidden_layers=2, ffn_dim=74, num_attention_heads=6,
        hidden_size=48, num_codebooks=2, pad_token_id=40, bos_token_id=40,
    )  # fmt: skip
    return build(tf.MusicgenForCausalLM, config)


def musicgen_inputs() -> dict[str, Any]:
    ids = torch.randint(0, 40, (4, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def bark() -> PreTrainedModel:
    config = tf.BarkSemanticConfig(
        block_size=32,
        input_vocab_size=VOCABULARY,
        output_vocab_size=VOCABULARY,
        num_layers=2,
        num_heads=6,
        hidden_size=48,
    )
    return build(tf.BarkSemanticModel, config, attention="eager")


def time_series() -> PreTrainedModel:
    config = tf.TimeSeriesTransformerConfig(
        prediction_length=3, context_length=8, lags_sequence=[1, 2], d_model=48, encoder_attention_heads=6,
        decoder_attention_heads=4, encoder_ffn_dim=74, decoder_ffn_dim=70, num_time_features=1,
    )  # fmt: skip
    return build(tf.TimeSeriesTransformerModel, config, attention="eager")


def patchtst() -> PreTrainedModel:
    config = tf.PatchTSTConfig(
        num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, prediction_length=3, d_model=48,
        num_hidden_layers=2, num_attention_heads=6, ffn_dim=74, do_mask_input=False,
    )  # fmt: skip
    return build(tf.PatchTSTForPrediction, config, attention="eager")


def series_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(6)
    return {
        "past_values": torch.randn(2, 10, generator=generator),
        "past_time_features": torch.randn(2, 10, 1, generator=generator),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 3, generator=generator),
        "future_time_features": torch.randn(2, 3, 1, generator=generator),
    }


SWIN = {"embed_dim": 12, "depths": [1, 2], "num_heads": [3, 6], "window_size": 2, "image_size": 16, "patch_size": 2}
DEEPSTACK = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
NORMED = {**VISION, "image_size": [16, 16], "patch_size": [4, 4], "use_qk_norm": True, "norm_type": "rms_norm"}
SIGLIP = {**VISION, "projection_dim": 48, "vision_use_head": False}
RESAMPLER = {
    "hidden_size": 48, "resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 6, "resampler_head_dim": 8,
    "num_key_value_heads": 3,
}  # fmt: skip
TWO_SEQUENCES = torch.tensor([[101, 9, 8, 102], [101, 7, 6, 102]])

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
    "moonshine": (moonshine, moonshine_inputs),
}
TOWERS = {
    "dinov2": lambda: build(tf.Dinov2ForImageClassification, tf.Dinov2Config(num_labels=5, **VISION)),
    "dinov2-gated": lambda: build(tf.Dinov2Model, tf.Dinov2Config(use_swiglu_ffn=True, **VISION)),
    "dinov2-registers": lambda: build(tf.Dinov2WithRegistersModel, tf.Dinov2WithRegistersConfig(**VISION)),
    "dinov3": lambda: build(tf.DINOv3ViTModel, tf.DINOv3ViTConfig(**VISION)),
    "dinov3-gated": lambda: build(tf.DINOv3ViTModel, tf.DINOv3ViTConfig(use_gated_mlp=True, **VISION)),
    "swinv2": lambda: build(tf.Swinv2Model, tf.Swinv2Config(**SWIN), attention="eager"),
    "swin": lambda: build(tf.SwinForImageClassification, tf.SwinConfig(num_labels=5, **SWIN)),
}
CASES = [
    *(Case(name, make, inputs, generates=True) for name, (make, inputs) in READERS.items()),
    *(Case(name, make, image_inputs) for name, make in TOWERS.items()),
    Case("sam", sam, sam_inputs),
    Case("grounding-dino", grounding_dino, lambda: {**image_inputs(64), "input_ids": TWO_SEQUENCES}),
    Case("seamless-m4t", seamless, seq2seq_inputs),
    Case("seamless-m4t-speech", lambda: seamless(head="ForSpeechToText"), speech_inputs),
    Case("seamless-m4t-v2-speech", lambda: seamless("SeamlessM4Tv2", "ForSpeechToText"), speech_inputs),
    Case("musicgen", musicgen, musicgen_inputs),
    Case("bark", bark, lambda: {"input_ids": token_ids()}),
    Case("patchtst", patchtst, lambda: {"past_values": torch.arange(64.0).sin().reshape(2, 16, 2)}),
    Case("time-series-transformer", time_series, series_inputs),
]
