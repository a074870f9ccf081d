"""Lists all model types of the installed transformers, each with its most complete class."""

from __future__ import annotations

import contextlib
from functools import cache

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_TASKS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "VIDEO_CLASSIFICATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "TEXT_TO_WAVEFORM",
)


def model_classes() -> dict[str, tuple[str, str]]:
    """Return a map from model type to (configuration class name, model class name), for exported classes."""
    listed = ((name, config, classes_of(name)) for name, config in CONFIG_MAPPING_NAMES.items())
    return {name: (config, classes[0]) for name, config, classes in listed if classes}


def classes_of(model_type: str) -> list[str]:
    """Return the names of a model type's exported classes, the most complete first."""
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    mappings += [modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES]
    names = []
    for mapping in mappings:
        name = mapping.get(model_type)
        name = name[0] if isinstance(name, (list, tuple)) else name
        if name and name in _exported():
            names.append(name)
    return list(dict.fromkeys(names))


def generating_classes(model_type: str) -> list[str]:
    """Return the names of a model type's exported classes that generate, the most complete first."""
    names = []
    for name in classes_of(model_type):
        with contextlib.suppress(ImportError):  # a class that needs a missing package raises on access
            if getattr(transformers, name).can_generate():
                names.append(name)
    return names


@cache
def _exported() -> set[str]:
    return set(dir(transformers))
