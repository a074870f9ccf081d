"""Tests the kinds of served models and the refused models, with folders that contain only a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from parallelformers_ng.cli import commands
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.model_kinds import kind_of
from parallelformers_ng.serving.run import warm_up


def written(folder: Path, name: str, config: tf.PreTrainedConfig | None = None) -> str:
    """Write the configuration of a model class, and return the folder."""
    config = config or getattr(tf, name).config_class()
    config.architectures = [name]
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", "text"),
        ("BertLMHeadModel", "text"),
        ("T5ForConditionalGeneration", "text"),
        ("Gemma3ForCausalLM", "text"),
        ("LlavaForConditionalGeneration", "text, with pictures in chats"),
        ("Qwen2AudioForConditionalGeneration", "text; sound in requests is refused"),
        ("WhisperForConditionalGeneration", "transcripts of sound"),
        ("BertModel", "embeddings pooled by mean"),
        ("T5EncoderModel", "embeddings pooled by mean"),
        ("LlamaModel", "embeddings pooled by mean"),
    ],
)
def test_config_decides_the_kind_of_server(name, kind, tmp_path):
    assert str(kind_of(written(tmp_path, name))) == kind


@pytest.mark.parametrize(
    "name",
    [
        "BertForSequenceClassification", "LlamaForSequenceClassification", "BertForTokenClassification",
        "BertForMaskedLM", "Speech2TextForConditionalGeneration", "Wav2Vec2Model", "ViTModel", "CLIPModel", "BartModel",
        "T5Model", "MusicgenForConditionalGeneration", "SpeechT5ForTextToSpeech",
    ],
)  # fmt: skip
def test_other_models_are_refused_at_the_start(name, tmp_path, capsys):
    config = None
    if name.startswith("Musicgen"):
        parts = (tf.T5Config(), tf.EncodecConfig(), tf.MusicgenDecoderConfig())
        config = tf.MusicgenConfig(**dict(zip(("text_encoder", "audio_encoder", "decoder"), parts, strict=True)))
    folder = written(tmp_path, name, config)
    assert commands.main(["serve", folder, "--port", "0", "--device", "cpu"]) == 2
    assert f"is a {name}, which the server cannot serve" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "Qwen3ForSequenceClassification"])
def test_classifiers_with_one_label_score(name, tmp_path):
    config = getattr(tf, name).config_class(num_labels=1)
    assert str(kind_of(written(tmp_path / "one", name, config))) == "scores of pairs of texts"
    config.sentence_transformers = {"activation_fn": "a_module.of_its_own"}
    with pytest.raises(UnsupportedModelError, match="activation function a_module"):
        kind_of(written(tmp_path / "own", name, config))


def test_model_failing_with_a_token_is_refused():
    class Odd(torch.nn.Module):
        def can_generate(self) -> bool:
            return False

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(UnsupportedModelError, match="Odd returns neither token vectors"):
        warm_up(Odd())
