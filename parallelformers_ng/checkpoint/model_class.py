"""Finds the class of a configuration, and builds models from a configuration alone."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from parallelformers_ng.checkpoint.location import Location
from parallelformers_ng.errors import UnsupportedModelError

log = logging.getLogger("parallelformers_ng")


def class_of(
    config: PreTrainedConfig, location: Location | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """Return the class that a configuration names, else that of the most telling auto mapping, which a log line says.

    Args:
        config: the configuration.
        location: origin of the configuration, which may have code of its own.
        trust_remote_code: allow that code to run here.

    Raises:
        UnsupportedModelError: there is none in the installed transformers, or it is code that is not trusted.
    """
    names = list(config.architectures or ())
    where = location or type(config).__name__
    remote = {value.rpartition(".")[2]: value for value in (getattr(config, "auto_map", None) or {}).values()}
    if names and names[0] in remote and location is not None:
        if not trust_remote_code:
            raise UnsupportedModelError(
                f"{where}: {names[0]} is code that comes with the checkpoint; read it, then pass trust_remote_code=True"
            )
        download = {key: value for key, value in location.download.items() if key != "subfolder"}
        return get_class_from_dynamic_module(remote[names[0]], location.path, **download)
    for name in names:
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            return cls
    if names or (named_class := _of_auto_mappings(config)) is None:
        raise UnsupportedModelError(
            f"{where}: transformers {transformers.__version__} has no model class"
            f" {' or '.join(names) or f'for {type(config).__name__}, and it names none'}; pass model_class="
        )
    if location is not None:
        log.warning(
            "%s names no architectures and is taken as %s; model_class= says otherwise", where, named_class.__name__
        )
    return named_class


def _of_auto_mappings(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
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
    return None


def empty_model(name: str, revision: str | None = None) -> PreTrainedModel:
    """Return the model that `name` describes, on `meta`: shapes and no weights. Nothing but its configuration is read.

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
    """Return whether a name stands for a type's default configuration: no file or folder is called so."""
    return not Path(name).exists() and name in transformers.CONFIG_MAPPING
