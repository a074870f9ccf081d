"""Finds the output of a model from its configuration: text, embeddings, scores or transcripts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.models.auto import modeling_auto as auto

from parallelformers_ng.checkpoint.location import base_of_adapter, read_source
from parallelformers_ng.checkpoint.model_class import class_of
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.forwards import activation_of
from parallelformers_ng.serving.sentence_modules import Pooling, SentenceFiles, read_pooling

_TEXT = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
_PICTURES = ("vision_config", "vq_config", "image_token_id", "image_token_index")
_SOUND = ("audio_config", "speech_config")
"""Configuration attributes of models that read pictures, and of models that read sound."""


@dataclass(frozen=True)
class Kind:
    """What a served model reads and writes.

    Attributes:
        pooling: pooling of the embeddings; None if the model makes no embeddings.
        activation: function from a classifier's logits to scores; None if the model is not a classifier.
        reads_sound: whether the model also reads sound; the server refuses sound in chats.
        model_class: class to load the model with; None for the class in the model's configuration.
    """

    pooling: Pooling | None = None
    activation: Any = None
    reads_pictures: bool = False
    reads_sound: bool = False
    transcribes: bool = False
    model_class: Any = None

    @property
    def writes_text(self) -> bool:
        return self.pooling is None and self.activation is None and not self.transcribes

    def __str__(self) -> str:
        if self.pooling is not None:
            return f"embeddings pooled by {', '.join(self.pooling.modes)}"
        if self.activation is not None:
            return "scores of pairs of texts"
        if self.transcribes:
            return "transcripts of sound"
        description = "text, with pictures in chats" if self.reads_pictures else "text"
        return f"{description}; sound in requests is refused" if self.reads_sound else description


def kind_of(name: str, revision: str | None = None) -> Kind:
    """Find out from a model's configuration what the model reads and writes.

    The function reads no weights, except those of sentence-transformers' modules after the pooling. A GGUF file counts
    as a text model without being opened.
    """
    if name.endswith(".gguf"):
        return Kind()
    name = base_of_adapter(name) or name
    source = read_source(name, {"revision": revision})
    config = source.config
    assert config is not None
    cls = class_of(config, source.location)
    reads_text = cls.main_input_name == "input_ids"
    pictures, sound = (any(getattr(config, each, None) is not None for each in of) for of in (_PICTURES, _SOUND))
    if cls.can_generate() and reads_text and _names(cls, *_TEXT):
        if not (pictures or sound or config.is_encoder_decoder) and _has_modules(name, revision):
            return Kind(read_pooling(name, revision), model_class=auto.MODEL_MAPPING[type(config)])
        return Kind(reads_pictures=pictures, reads_sound=sound)
    if cls.__name__ == "WhisperForConditionalGeneration":
        return Kind(transcribes=True)
    if reads_text and not pictures and not sound:
        is_encoder = _names(cls, auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES)
        if is_encoder or (_names(cls, auto.MODEL_MAPPING_NAMES) and not config.is_encoder_decoder):
            return Kind(read_pooling(name, revision))
        if cls.__name__.endswith("ForMaskedLM") and SentenceFiles(name, revision).find("modules.json"):
            return Kind(read_pooling(name, revision), model_class=auto.MODEL_MAPPING[type(config)])
        if _names(cls, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES) and not config.is_encoder_decoder:
            if config.num_labels != 1:
                raise UnsupportedModelError(
                    f"{name} is a {cls.__name__}, which the server cannot serve with {config.num_labels} labels; choose"
                    " a classifier with 1 label, which scores pairs of texts"
                )
            return Kind(activation=activation_of(config))
    raise UnsupportedModelError(
        f"{name} is a {cls.__name__}, which the server cannot serve; choose a text model (…ForCausalLM,"
        " …ForConditionalGeneration), a text encoder without a head for embeddings, a text classifier with 1 label for"
        " scores, or Whisper for transcripts"
    )


def _has_modules(name: str, revision: str | None) -> bool:
    """Whether a decoder comes with `modules.json` of sentence-transformers, so that it makes embeddings, not text."""
    try:
        return SentenceFiles(name, revision).find("modules.json") is not None
    except UnsupportedModelError:  # the hub cannot be reached, so assume a decoder that writes text
        return False


def _names(cls: type, *mappings: Any) -> bool:
    """Whether transformers' auto mappings, from model types to class names, contain the name of a class."""
    named = [name for mapping in mappings for name in mapping.values()]
    return any(cls.__name__ in ((name,) if isinstance(name, str) else name) for name in named)
