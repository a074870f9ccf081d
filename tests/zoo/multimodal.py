"""Makes tiny newer models of images, sound or time series."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, image_inputs, seq2seq_inputs, token_ids
from tests.zoo.decoders import SPECIAL_IDS
from tests.zoo.vision_audio import IMAGES, TOWER

VISION = {**TOWER, **IMAGES}


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
TWO_SEQUENCES = torch.tensor([[101, 9, 8, 102], [101, 7, 6, 102]])

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
    *(Case(name, make, image_inputs) for name, make in TOWERS.items()),
    Case("moonshine", moonshine, moonshine_inputs, generates=True),
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
