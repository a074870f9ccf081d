"""Saves tiny models that read pictures or sound, with their processors, in the form that a server loads."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers as tf
from PIL import Image
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.helpers.server import END, tiny_tokenizer
from tests.zoo.build import build
from tests.zoo.readers import TEXT, VISION

PARTS_TEMPLATE = """\
{%- for message in messages %}{{ '<|start|>' + message.role + '\\n' }}
{%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>' }}{% endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}
{{- '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""
"""A template like Llava's: it reads only lists of parts, and would drop a plain string."""
MIXED_TEMPLATE = """\
{%- for message in messages %}{{ '<|start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{{ '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""


def _tokenizer(*tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    return tokenizer


def _text(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return {**TEXT, **ends, "model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 512}


def save_llava(folder: Path) -> Path:
    """Save a Llava, whose number of tokens for a picture follows from the number of patches; return the folder."""
    tokenizer = _tokenizer("<image>", "<s>")
    begin = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.bos_token = "<s>"  # the tokenizer adds it, and the template does not
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = tf.LlavaConfig(
        text_config=_text(tokenizer), vision_config={**VISION, "model_type": "clip_vision_model"},
        image_token_id=image, image_token_index=image, image_seq_length=16,
    )  # fmt: skip
    size = {"height": VISION["image_size"], "width": VISION["image_size"]}
    pictures = tf.CLIPImageProcessor(size={"shortest_edge": size["height"]}, crop_size=size)
    processor = tf.LlavaProcessor(
        pictures, tokenizer, patch_size=VISION["patch_size"], vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=PARTS_TEMPLATE,
    )  # fmt: skip
    return _save(folder, tf.LlavaForConditionalGeneration, config, processor)


def save_idefics3(folder: Path) -> Path:
    """Save an Idefics 3, which splits a picture into tiles, with special tokens for rows and columns; return the
    folder."""
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = _tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *places)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = tf.Idefics3Config(text_config=_text(tokenizer), vision_config=VISION, image_token_id=image, scale_factor=2)
    edge = {"longest_edge": VISION["image_size"]}
    pictures = tf.Idefics3ImageProcessor(size={"longest_edge": 2 * VISION["image_size"]}, max_image_size=edge)
    processor = tf.Idefics3Processor(pictures, tokenizer, image_seq_len=4, chat_template=MIXED_TEMPLATE)
    return _save(folder, tf.Idefics3ForConditionalGeneration, config, processor)


def save_whisper(folder: Path, seconds: int = 2) -> Path:
    """Save a Whisper that reads `seconds` of sound at a time; return the folder."""
    marks = ["<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|startofprev|>"]
    stamps = [f"<|{step / 50:.2f}|>" for step in range(50 * seconds + 1)]
    tokenizer = _tokenizer(*marks, "<|startoflm|>", "<|nospeech|>", "<|notimestamps|>", *stamps)
    ids = tokenizer.convert_tokens_to_ids
    end, start = tokenizer.eos_token_id, ids("<|startoftranscript|>")
    config = tf.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=48, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=6, decoder_attention_heads=4, encoder_ffn_dim=74, decoder_ffn_dim=70,
        max_source_positions=50 * seconds, max_target_positions=32, pad_token_id=end, bos_token_id=end,
        eos_token_id=end, decoder_start_token_id=start, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = build(tf.WhisperForConditionalGeneration, config)
    model.generation_config = tf.GenerationConfig(
        is_multilingual=True, lang_to_id={"<|en|>": ids("<|en|>"), "<|de|>": ids("<|de|>")},
        task_to_id={"translate": ids("<|translate|>"), "transcribe": ids("<|transcribe|>")},
        no_timestamps_token_id=ids("<|notimestamps|>"), prev_sot_token_id=ids("<|startofprev|>"), max_length=32,
        decoder_start_token_id=start, eos_token_id=end, pad_token_id=end, bos_token_id=end,
        max_initial_timestamp_index=50, return_timestamps=False,
    )  # fmt: skip
    extractor = tf.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    words = folder / "words"
    tokenizer.save_pretrained(words)
    whisper = tf.WhisperTokenizer.from_pretrained(words, **dict.fromkeys(("bos_token", "unk_token"), END))
    model.save_pretrained(folder)
    tf.WhisperProcessor(extractor, whisper).save_pretrained(folder)
    return folder


def _save(folder: Path, cls: Any, config: Any, processor: Any) -> Path:
    model = build(cls, config)
    ends = config.text_config.eos_token_id
    model.generation_config = tf.GenerationConfig(eos_token_id=ends, pad_token_id=ends)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def picture(width: int = 40, height: int = 30, seed: int = 0) -> Image.Image:
    """Return a random picture."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


def data_url(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Return the data URL of a picture."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def tone(seconds: float, rate: int = 16_000) -> np.ndarray:
    """Return samples of a sound."""
    time = np.arange(int(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * (300 + 200 * time) * time) + 0.1 * np.sin(2 * np.pi * 1000 * time)).astype(
        "float32"
    )


def sound_file(samples: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = "FLOAT") -> bytes:
    """Return the bytes of a sound file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()
