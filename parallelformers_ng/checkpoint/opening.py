"""From a path or hub id to a model whose weights have not been read: each tensor remembers where its bytes are.

transformers' own `from_pretrained` runs in the parent on tensors that only remember (`lazy`), so names, conversions,
ties, missing and unexpected keys, casts and reports are its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.load_options import Source, read_source
from parallelformers_ng.checkpoint.location import Location, read_generation_config
from parallelformers_ng.checkpoint.model_class import class_of
from parallelformers_ng.checkpoint.nodes import leaves
from parallelformers_ng.checkpoint.source import lazy_state
from parallelformers_ng.errors import CheckpointError, UnsupportedModelError
from parallelformers_ng.sharding.tensors import set_tensor


def open_source(source: Source, model: Any, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model in evaluation mode whose weights have not been read.

    Args:
        source: where they are, and the arguments of `from_pretrained` that came with it.
        model: a model on `meta` that is to get them; anything else stands for a new one.
        dtype: data type to load in; None as `from_pretrained` chooses, or as the model is.

    Raises:
        CheckpointError: a file is missing or damaged; it is named.
        UnsupportedModelError: the configuration names no class that can be loaded, or the weights are quantized.
    """
    location, config = source.location, source.config
    if config is None:
        fill_skeleton(model, location, dtype)
        return model
    cls = source.model_class or class_of(config, location, source.trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{location} is quantized; quantized weights cannot be cut yet")
    made = _from_pretrained(cls, config, location, "auto" if dtype is None else dtype, source.options)
    made.config.name_or_path = made.name_or_path = location.path
    if made.can_generate():
        made.generation_config = read_generation_config(location)
    return made


def load_skeleton(
    path: str, dtype: torch.dtype | None = None, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """`open_source` of a path with arguments of `from_pretrained`."""
    return open_source(read_source(path, options, model_class), None, dtype)


def fill_skeleton(model: PreTrainedModel, location: Location, dtype: torch.dtype | None = None) -> None:
    """Give a model on `meta` its unread weights; what the model holds for real already, it keeps.

    Args:
        dtype: data type to load in; None is the model's own.

    Raises:
        CheckpointError: a file is missing or damaged, or a parameter of the model is not in the checkpoint.
    """
    tensors = _tensors(_from_pretrained(type(model), model.config, location, dtype or model.dtype, {}))
    for name, tensor in _tensors(model).items():
        if tensor.device.type != "meta":
            continue
        if name not in tensors or tensors[name].shape != tensor.shape:
            found = list(tensors[name].shape) if name in tensors else "nothing"
            raise CheckpointError(f"{location} holds {found} for {name} {list(tensor.shape)} of {type(model).__name__}")
        set_tensor(model, name, tensors[name], not isinstance(tensor, torch.nn.Parameter))


def _from_pretrained(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    location: Location,
    dtype: torch.dtype | str,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    state = lazy_state(location)
    given = options.get("ignore_mismatched_sizes", False)
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would count tensors of which none is read
    log, named = logging.get_logger("transformers.modeling_utils"), _Named(location)
    log.addFilter(named)
    # Wrong shapes are refused below, with the file's name.
    options = {"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
    try:
        model, info = cls.from_pretrained(None, config=config, state_dict=state, dtype=dtype, **options)
    except RuntimeError as error:
        raise CheckpointError(f"{location} cannot be converted to {cls.__name__}: {error}") from error
    finally:
        log.removeFilter(named)
        if shows:
            logging.enable_progress_bar()
    if not given:
        _refuse_wrong_shapes(info["mismatched_keys"], state, location)
    _refuse_flipped_names(info["missing_keys"], info["unexpected_keys"], state)
    return model


class _Named:
    """Names the checkpoint in transformers' report of missing and unexpected keys, which it gets without a path."""

    def __init__(self, location: Location) -> None:
        self._location = location

    def filter(self, record: Any) -> bool:
        record.msg = str(record.msg).replace("from: None\n", f"from: {self._location}\n")
        return True


def _refuse_wrong_shapes(mismatched: Iterable[tuple], state: dict[str, LazyTensor], location: Location) -> None:
    for name, found, wanted in mismatched:
        # A converted tensor comes from several; then the directory has to do.
        where = _path_of(state[name]) if name in state else location
        raise CheckpointError(f"{where} holds {list(found)} for {name}, and the configuration says {list(wanted)}")


def _refuse_flipped_names(missing: Iterable[str], unexpected: Iterable[str], state: dict[str, LazyTensor]) -> None:
    """A missing name of which another is one bit away was damaged; drawing random weights for it helps nobody."""
    stored = set(unexpected)
    for name in missing:
        for index, letter in enumerate(name):
            for bit in range(8):
                other = f"{name[:index]}{chr(ord(letter) ^ (1 << bit))}{name[index + 1 :]}"
                if other in stored and other in state:
                    raise CheckpointError(f"{_path_of(state[other])} is damaged: it says {other!r} for {name}")


def _path_of(tensor: LazyTensor) -> str:
    return next(leaf.file.path for leaf in leaves(tensor.node) if isinstance(leaf, FileLeaf))


def _tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}
