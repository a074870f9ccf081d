"""Every model type of the installed transformers, each with the class that shows the most of it."""

from __future__ import annotations

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
)


def model_classes() -> dict[str, tuple[str, str]]:
    """Model type → (name of its configuration class, name of its model class), for those that transformers exports."""
    found: dict[str, tuple[str, str]] = {}
    exported = set(dir(transformers))
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in _TASKS]
    for model_type, config_name in CONFIG_MAPPING_NAMES.items():
        for mapping in (
            *mappings,
            modeling_auto.MODEL_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES,
        ):
            name = mapping.get(model_type)
            name = name[0] if isinstance(name, (list, tuple)) else name
            if name and name in exported:
                found[model_type] = (config_name, name)
                break
    return found
