"""The kind of a served model, known from its configuration: text, embeddings, scores, or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers.models.auto import modeling_auto as auto

from parallelformers_ng.checkpoint.location import base_of_adapter, read_source
from parallelformers_ng.checkpoint.model_class import class_of
from parallelformers_ng.errors import UnsupportedModelError
from parallelformers_ng.serving.pooling import Pooling
from parallelformers_ng.serving.scores import activation_of
from parallelformers_ng.serving.sentence_modules import SentenceFiles, read_pooling

_TEXT = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
_TRANSCRIBERS = ("WhisperForConditionalGeneration",)
_ENCODERS = (auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,)
_CLASSIFIERS = (auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,)
_BASES = (auto.MODEL_MAPPING_NAMES,)
_PICTURES = ("vision_config", "vq_config", "image_token_id", "image_token_index")
_SOUND = ("audio_config", "speech_config")
"""Attributes of a configuration that say that the model reads pictures, or sound."""


@dataclass(frozen=True)
class Kind:
    """The kind of a served model.

    Attributes:
        pooling: pooling of its embeddings; None if it gives none.
        activation: function from a classifier's logits to scores; None for other models.
        reads_pictures: whether chats may have pictures.
        reads_sound: whether the model also reads sound, which the server refuses in chats.
        transcribes: whether it makes text of sound, and of nothing else.
        model_class: class to load; None for the class that its configuration names.
    """

    pooling: Pooling | None = None
    activation: Any = None
    reads_pictures: bool = False
    reads_sound: bool = False
    transcribes: bool = False
    model_class: Any = None

    @property
    def writes_text(self) -> bool:
        """Whether the model is served as one that continues text."""
        return self.pooling is None and self.activation is None and not self.transcribes

    def __str__(self) -> str:
        if self.pooling is not None:
            return f"embeddings pooled by {', '.join(self.pooling.modes)}"
        if self.activation is not None:
            return "scores of pairs of texts"
        if self.transcribes:
            return "text of sound"
        what = "text, with pictures in chats" if self.reads_pictures else "text"
        return f"{what}; sound in requests is refused" if self.reads_sound else what


def is_gguf(name: str) -> bool:
    """Return whether a model is a file of llama.cpp's, which transformers reads as text models."""
    return name.endswith(".gguf")


def kind_of(name: str, revision: str | None = None) -> Kind:
    """Return what a model is served as; its weights are not read.

    Args:
        name: model folder, or name on the Hugging Face hub.
        revision: branch, tag or commit on the hub; None for the main branch.

    Raises:
        UnsupportedModelError: the server has no use for such a model.
        CheckpointError: there is no such model.
    """
    if is_gguf(name):
        return Kind()
    name = base_of_adapter(name) or name
    source = read_source(name, {} if revision is None else {"revision": revision})
    config = source.config
    assert config is not None
    cls = class_of(config, source.location)
    reads_text = cls.main_input_name == "input_ids"
    pictures, sound = (any(getattr(config, each, None) is not None for each in of) for of in (_PICTURES, _SOUND))
    reads_more = pictures or sound
    if cls.can_generate() and reads_text and _names(cls, _TEXT):
        if not reads_more and not config.is_encoder_decoder and _has_modules(name, revision):
            return Kind(read_pooling(name, revision), model_class=auto.MODEL_MAPPING[type(config)])
        return Kind(reads_pictures=pictures, reads_sound=sound)
    if cls.__name__ in _TRANSCRIBERS:
        return Kind(transcribes=True)
    if reads_text and not reads_more:
        if _names(cls, _ENCODERS) or (_names(cls, _BASES) and not config.is_encoder_decoder):
            return Kind(read_pooling(name, revision))
        if cls.__name__.endswith("ForMaskedLM") and SentenceFiles(name, revision).find("modules.json"):
            return Kind(read_pooling(name, revision), model_class=auto.MODEL_MAPPING[type(config)])
        if _names(cls, _CLASSIFIERS) and not config.is_encoder_decoder:
            if config.num_labels != 1:
                raise UnsupportedModelError(
                    f"{name} is a {cls.__name__}, which is not served with {config.num_labels} labels: the server takes"
                    " classifiers with one, which score pairs of texts"
                )
            return Kind(activation=activation_of(config))
    raise UnsupportedModelError(
        f"{name} is a {cls.__name__}, which is not served: the server takes models that continue text"
        " (…ForCausalLM, …ForConditionalGeneration of text), encoders of text without a head, for embeddings,"
        " classifiers of texts with one label, for scores, and Whisper, for text of sound"
    )


def _has_modules(name: str, revision: str | None) -> bool:
    """Return whether a decoder is one of sentence-transformers, which takes its vectors and not its text."""
    try:
        return SentenceFiles(name, revision).find("modules.json") is not None
    except UnsupportedModelError:  # the hub cannot be asked: it is a decoder like most
        return False


def _names(cls: type, mappings: tuple[Any, ...]) -> bool:
    """Return whether one of transformers' tables has a class."""
    named = [name for mapping in mappings for name in mapping.values()]
    return any(cls.__name__ in ((name,) if isinstance(name, str) else name) for name in named)
