"""Makes tiny models of images and sound, with or without text."""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from transformers import PreTrainedModel

from tests.zoo.build import build
from tests.zoo.case import VOCABULARY, Case, image_inputs, text_inputs, token_ids

TOWER = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 74}
IMAGES = {"image_size": 16, "patch_size": 4}
IMAGE_TOKEN = 130


def text_and_image_inputs() -> dict[str, Any]:
    return {**text_inputs(), **image_inputs()}


def gemma3_inputs() -> dict[str, Any]:
    """Return rows of text with the four tokens of one image each."""
    ids = token_ids() % IMAGE_TOKEN
    ids[:, 1:5] = IMAGE_TOKEN
    return {"input_ids": ids, "token_type_ids": (ids == IMAGE_TOKEN).long(), **image_inputs()}


def spectrogram_inputs() -> dict[str, Any]:
    features = torch.randn(2, 16, 24, generator=torch.Generator().manual_seed(4))
    return {"input_features": features, "decoder_input_ids": token_ids(length=4, seed=2)}


def sound_inputs() -> dict[str, Any]:
    """Return two rows of samples; the second row is shorter."""
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, 300:] = 0
    return {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(5)), "attention_mask": mask}


def vit() -> PreTrainedModel:
    return build(tf.ViTForImageClassification, tf.ViTConfig(num_labels=5, **TOWER, **IMAGES))


def clip(family: str = "CLIP", vision_heads: int = 5, **options: Any) -> PreTrainedModel:
    """Return a model with two towers; `options` are passed to the joint configuration."""
    special_ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = {**TOWER, "vocab_size": VOCABULARY, "max_position_embeddings": 16, **special_ids}
    vision = {**IMAGES, **TOWER, "hidden_size": 8 * vision_heads, "num_attention_heads": vision_heads}
    config = getattr(tf, f"{family}Config")(text_config=text, vision_config=vision, **options)
    return build(getattr(tf, f"{family}Model"), config)


def gemma3() -> PreTrainedModel:
    text = {
        "vocab_size": VOCABULARY, "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 64,
        "sliding_window": 4, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"],
        **TOWER,
    }  # fmt: skip
    config = tf.Gemma3Config(
        text_config=text, vision_config={**TOWER, **IMAGES, "vision_use_head": False}, mm_tokens_per_image=4,
        image_token_id=IMAGE_TOKEN, boi_token_id=3, eoi_token_id=4, eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return build(tf.Gemma3ForConditionalGeneration, config)


def whisper() -> PreTrainedModel:
    config = tf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=16, d_model=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=6, decoder_attention_heads=4, encoder_ffn_dim=74, decoder_ffn_dim=70,
        max_source_positions=12, max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return build(tf.WhisperForConditionalGeneration, config)


def wav2vec2(family: str = "Wav2Vec2", attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    """Return an encoder of raw samples of `family` ("Wav2Vec2", "Hubert", …)."""
    config = getattr(tf, f"{family}Config")(
        vocab_size=VOCABULARY, conv_dim=(16, 20), conv_kernel=(10, 4), conv_stride=(5, 4), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, **TOWER, **options,
    )  # fmt: skip
    return build(getattr(tf, f"{family}ForCTC"), config, attention=attention)


CASES = [
    Case("vit", vit, image_inputs),
    Case("clip", lambda: clip(projection_dim=22), text_and_image_inputs),
    Case("siglip", lambda: clip("Siglip", vision_heads=6), text_and_image_inputs),
    Case("gemma3-images", gemma3, gemma3_inputs, generates=True),
    Case("whisper", whisper, spectrogram_inputs, generates=True),
    Case("wav2vec2", wav2vec2, sound_inputs),
    Case("wav2vec2-stable", lambda: wav2vec2(do_stable_layer_norm=True, adapter_attn_dim=6), sound_inputs),
    Case("hubert", lambda: wav2vec2("Hubert"), sound_inputs),
    Case("wavlm", lambda: wav2vec2("WavLM", attention="eager"), sound_inputs),
    Case("wavlm-stable", lambda: wav2vec2("WavLM", attention="eager", do_stable_layer_norm=True), sound_inputs),
    Case("unispeech", lambda: wav2vec2("UniSpeech"), sound_inputs),
    Case("unispeech-sat", lambda: wav2vec2("UniSpeechSat"), sound_inputs),
    Case("data2vec-audio", lambda: wav2vec2("Data2VecAudio"), sound_inputs),
    Case("sew", lambda: wav2vec2("SEW", squeeze_factor=2), sound_inputs),
]
