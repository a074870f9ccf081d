"""A model from its configuration alone, on the `meta` device: shapes and no weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from parallelformers_ng.errors import UnsupportedModelError


def blueprint(name: str, revision: str | None = None) -> PreTrainedModel:
    """The model that `name` describes, without weights. Nothing but its configuration is read.

    Args:
        name: a model folder, the path of a `config.json`, a name on the Hugging Face hub, or a model type
            ("llama"), which stands for its default configuration.
        revision: branch, tag or commit on the hub.

    Raises:
        UnsupportedModelError: its class is not in the installed transformers.
        OSError: there is no such configuration.
    """
    if name.startswith(("/", "./", "../")) and not Path(name).exists():
        raise FileNotFoundError(f"no model folder or config.json at {name}")
    if is_model_type(name):
        config: PreTrainedConfig = transformers.CONFIG_MAPPING[name]()
    else:
        config = AutoConfig.from_pretrained(name, revision=revision)
    cls = model_class(config)
    with torch.device("meta"):
        model = cls._from_config(config, dtype=config.dtype) if config.dtype else cls._from_config(config)
    return model.eval()


def is_model_type(name: str) -> bool:
    """Whether a name stands for a type's default configuration: no file or folder is called so."""
    return not Path(name).exists() and name in transformers.CONFIG_MAPPING


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a configuration names, else that of the most telling auto mapping.

    Raises:
        UnsupportedModelError: there is none in the installed transformers.
    """
    for name in config.architectures or ():
        if (cls := getattr(transformers, name, None)) is not None:
            return cls
    for auto in (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageTextToText,
        transformers.AutoModelForMaskedLM,
        AutoModel,
    ):
        if type(config) in auto._model_mapping:
            cls = auto._model_mapping[type(config)]
            return cls[0] if isinstance(cls, (list, tuple)) else cls
    raise UnsupportedModelError(
        f"transformers {transformers.__version__} has no model class for {type(config).__name__}"
        f" (architectures: {config.architectures})"
    )
