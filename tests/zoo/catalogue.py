"""Every model type of the installed transformers, each with the class that shows the most of it."""

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
    """Model type → (name of its configuration class, name of its model class), for those that transformers exports."""
    found = ((name, config, classes_of(name)) for name, config in CONFIG_MAPPING_NAMES.items())
    return {name: (config, classes[0]) for name, config, classes in found if classes}


def classes_of(model_type: str) -> list[str]:
    """Names of the exported classes of a model type, the most telling first."""
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    mappings += [modeling_auto.MODEL_MAPPING_NAMES, modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES]
    found = []
    for mapping in mappings:
        name = mapping.get(model_type)
        name = name[0] if isinstance(name, (list, tuple)) else name
        if name and name in _exported():
            found.append(name)
    return list(dict.fromkeys(found))


def generating_classes(model_type: str) -> list[str]:
    """Names of the exported classes of a model type that generate, the most telling first."""
    found = []
    for name in classes_of(model_type):
        with contextlib.suppress(ImportError):  # one that needs a package that is not here says so when looked at
            if getattr(transformers, name).can_generate():
                found.append(name)
    return found


@cache
def _exported() -> set[str]:
    return set(dir(transformers))
