"""Makes tiny text decoders that share weights between parts, or read images with another decoder."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, image_inputs, text_inputs, token_ids

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 74, "moe_intermediate_size": 40,
    "num_attention_heads": 6, "num_key_value_heads": 3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOWER = {"hidden_size": 40, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 5}


def diffusion_gemma() -> PreTrainedModel:
    """Return a model whose encoder has the decoder's weights; the last layer has no value projection."""
    text = {
        **TEXT, "head_dim": 8, "global_head_dim": 16, "num_hidden_layers": 3, "num_experts": 4, "top_k_experts": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 4,
    }  # fmt: skip
    vision = {**TOWER, "model_type": "gemma4_vision", "num_key_value_heads": 5, "head_dim": 8, "patch_size": 4}
    config = tf.DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=5)
    return build(tf.DiffusionGemmaForBlockDiffusion, config)


def diffusion_inputs() -> dict[str, Any]:
    """Return a canvas, and the logits of the last denoising step."""
    logits = torch.randn(2, 5, VOCABULARY, generator=torch.Generator().manual_seed(8))
    canvas = token_ids(length=5, seed=4)
    return {"input_ids": token_ids(), "decoder_input_ids": canvas, "self_conditioning_logits": logits}


def deepseek_ocr2() -> PreTrainedModel:
    text = {
        **TEXT, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    sam = {
        **TOWER, "mlp_dim": 70, "image_size": 64, "output_channels": 16, "downsample_channels": [20, 30],
        "window_size": 2, "global_attn_indexes": [1],
    }  # fmt: skip
    encoder = {
        "hidden_size": 30, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 5,
        "num_key_value_heads": 1, "max_position_embeddings": 512,
    }  # fmt: skip
    config = tf.DeepseekOcr2Config(text_config=text, vision_config={"sam_config": sam, "encoder_config": encoder})
    return build(tf.DeepseekOcr2ForConditionalGeneration, config)


def deepseek_ocr2_vision() -> PreTrainedModel:
    """Return the two image encoders alone; the outputs of their own queries represent an image in the text."""
    return deepseek_ocr2().model.vision_tower


CASES = [
    Case("diffusion-gemma", diffusion_gemma, diffusion_inputs),
    Case("deepseek-ocr2", deepseek_ocr2, text_inputs, generates=True),
    Case("deepseek-ocr2-vision", deepseek_ocr2_vision, lambda: image_inputs(64)),
]
