"""Finds the model class for a configuration, and builds models without weights from a configuration."""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from parallelformers_ng.checkpoint.location import Location
from parallelformers_ng.errors import UnsupportedModelError

log = logging.getLogger("parallelformers_ng")


def class_of(
    config: PreTrainedConfig, location: Location | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """Return the model class in `config.architectures`; if empty, the class that transformers' auto mappings choose.

    The function logs a warning if the auto mappings choose the class for a checkpoint.
    """
    names = list(config.architectures or ())
    where = location or type(config).__name__
    remote = {value.rpartition(".")[2]: value for value in (getattr(config, "auto_map", None) or {}).values()}
    if names and names[0] in remote and location is not None:
        if not trust_remote_code:
            raise UnsupportedModelError(
                f"{where}: {names[0]} is defined by code in the checkpoint; read that code, then pass"
                " trust_remote_code=True"
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
            f" {' or '.join(names) or f'for {type(config).__name__}, which names no class'}; pass model_class="
        )
    if location is not None:
        text = "%s names no architectures; it is loaded as %s. Pass model_class= for another class"
        log.warning(text, where, named_class.__name__)
    return named_class


def _of_auto_mappings(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    for head in ("ForCausalLM", "ForSeq2SeqLM", "ForImageTextToText", "ForMaskedLM", ""):
        mapping = getattr(transformers, f"AutoModel{head}")._model_mapping
        if type(config) in mapping:
            cls = mapping[type(config)]
            return cls[0] if isinstance(cls, (list, tuple)) else cls
    return None


def empty_model(name: str, revision: str | None = None) -> PreTrainedModel:
    """Build a model on `meta`, without weights, in evaluation mode. Only the configuration is read.

    Args:
        name: a model folder, the path of a `config.json`, a name on the Hugging Face hub, or a model type. A model type
            ("llama") stands for its default configuration.
    """
    if is_model_type(name):
        config: PreTrainedConfig = transformers.CONFIG_MAPPING[name]()
    else:
        config = AutoConfig.from_pretrained(name, revision=revision)
    return on_meta(class_of(config), config).eval()


def on_meta(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cls._from_config(copy.deepcopy(config))


def is_model_type(name: str) -> bool:
    return not Path(name).exists() and name in transformers.CONFIG_MAPPING
