"""A model from its configuration alone, on the `meta` device: shapes and no weights."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from parallelformers_ng.checkpoint.model_class import class_of


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
    cls = class_of(config)
    with torch.device("meta"):
        model = cls._from_config(config, dtype=config.dtype) if config.dtype else cls._from_config(config)
    return model.eval()


def is_model_type(name: str) -> bool:
    """Whether a name stands for a type's default configuration: no file or folder is called so."""
    return not Path(name).exists() and name in transformers.CONFIG_MAPPING
