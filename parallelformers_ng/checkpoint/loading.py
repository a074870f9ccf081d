"""From a path or hub id to a model whose weights have not been read: each tensor remembers where its bytes are.

transformers' own `from_pretrained` runs in the parent on tensors that only remember (`lazy`), so names, conversions,
ties, missing and unexpected keys, casts and reports are its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging

from parallelformers_ng.checkpoint.encoded import stored_nodes
from parallelformers_ng.checkpoint.files import FileLeaf, file_leaves
from parallelformers_ng.checkpoint.formats.stored_tensors import StoredTensors
from parallelformers_ng.checkpoint.formats.unpacking import unpacked
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.location import (
    Location,
    Source,
    open_weights,
    read_generation_config,
    read_source,
    stored_quantization,
)
from parallelformers_ng.checkpoint.model_class import class_of
from parallelformers_ng.checkpoint.nodes import Node, leaves, release
from parallelformers_ng.checkpoint.reading import lies_in_file
from parallelformers_ng.checkpoint.sharded_directory import is_sharded_directory, open_sharded
from parallelformers_ng.checkpoint.store import ShardStore, names_of_each, place
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tensors import all_tensors, get_tensor, set_tensor


class Checkpoint:
    """The files of a model's tensors, and the way to each tensor.

    Args:
        nodes: name of a parameter or buffer → how to read it. What is not named is in memory.
        copied: names of those that are read once, into the memory and the files that ranks map.
    """

    def __init__(self, nodes: Mapping[str, Node], copied: Collection[str] = ()) -> None:
        self.nodes = dict(nodes)
        self.copied = frozenset(copied)

    @classmethod
    def take(cls, model: PreTrainedModel, plan: ShardPlan) -> Checkpoint:
        """Take the unread tensors out of a model that `load_skeleton` made; `meta` tensors take their places."""
        nodes: dict[str, Node] = {}
        for names in names_of_each(model, plan):
            of_model = get_tensor(model, names[0], plan.tensors[names[0]].is_buffer)
            if isinstance(of_model, LazyTensor):
                nodes.update(dict.fromkeys(names, of_model.node))
                place(model, names, plan, torch.empty(of_model.shape, dtype=of_model.dtype, device="meta"))
        return cls(nodes, [tensor.name for tensor in plan.stored() if _must_be_copied(tensor, plan, nodes)])

    def of_model(self, plan: ShardPlan) -> list[str]:
        """Return the tensors outside of files: missing parameters, and buffers that are computed."""
        return [name for name, tensor in plan.tensors.items() if tensor.storage not in self.nodes]

    def as_stored(self, plan: ShardPlan) -> Checkpoint:
        """Return how to read what the ranks hold of it, as integers and scales where the plan has a tensor
        quantized."""
        nodes: dict[str, Node] = {}
        for name, node in self.nodes.items():
            nodes |= stored_nodes(plan, name, node)
        return Checkpoint(nodes, [part.name for name in self.copied for part in plan.parts(name)])

    def in_memory(self, plan: ShardPlan) -> ShardPlan:
        """Return the plan of what ranks do not read out of the files."""
        return dataclasses.replace(
            plan, tensors={name: tensor for name, tensor in plan.tensors.items() if not self.is_read(tensor)}
        )

    def is_read(self, tensor: TensorPlan) -> bool:
        """Return whether ranks read a tensor out of the files."""
        return tensor.storage in self.nodes and tensor.storage not in self.copied

    def copy(self, store: ShardStore) -> None:
        """Write to the store what is copied."""
        for name in self.copied:
            node = self.nodes[name]
            store.take(store.plan.tensors[name], node)
            release(node)


def _must_be_copied(tensor: TensorPlan, plan: ShardPlan, nodes: Mapping[str, Node]) -> bool:
    """Return whether a rank has its part of a tensor in RAM that it does not own, or on disk other than it lies in
    the checkpoint."""
    if plan.tiers is None or tensor.name not in nodes:
        return False
    for rank, shard in enumerate(tensor.shards):
        place = plan.tiers.place(tensor.name, rank)
        if place == "cpu" and not plan.tiers.is_cuda:
            return True
        lies_there = tensor.name not in plan.quantized and lies_in_file(nodes[tensor.name], shard, rank)
        if place == "disk" and not lies_there:
            return True
    return False


def open_source(
    source: Source, model: Any, dtype: torch.dtype | None = None, dequantize: bool = False
) -> PreTrainedModel:
    """Return a model in evaluation mode whose weights have not been read.

    Args:
        source: source of the files, with the arguments of `from_pretrained`.
        model: a model on `meta` that is to get them; anything else stands for a new one.
        dtype: data type of the loaded weights; None: the choice of `from_pretrained`, or the model's own.
        dequantize: whether weights may be put in high precision that are quantized in a way that nothing computes with.

    Raises:
        CheckpointError: a file is missing or damaged; it is named.
        UnsupportedModelError: the configuration names no class that can be loaded, or weights are quantized in a way
            that cannot be read.
    """
    location, config = source.location, source.config
    if config is None:
        fill_skeleton(model, location, dtype, dequantize)
        return model
    cls = source.model_class or class_of(config, location, source.trust_remote_code)
    plain = functools.partial(_on_meta, cls, config)
    state = _plain_state(location, dtype or config.dtype or torch.bfloat16, plain, dequantize)
    vars(config).pop("quantization_config", None)  # of weights that are plain from here on
    built = model_of(cls, config, location, "auto" if dtype is None else dtype, source.options, state)
    built.config.name_or_path = built.name_or_path = location.path
    if built.can_generate():
        built.generation_config = read_generation_config(location)
    return built


def load_skeleton(
    path: str,
    dtype: torch.dtype | None = None,
    model_class: type[PreTrainedModel] | None = None,
    dequantize: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """`open_source` of a path with arguments of `from_pretrained`."""
    return open_source(read_source(path, options, model_class), None, dtype, dequantize)


def fill_skeleton(
    model: PreTrainedModel, location: Location, dtype: torch.dtype | None = None, dequantize: bool = False
) -> None:
    """Give a model on `meta` its unread weights; what the model holds for real already, it keeps.

    Args:
        dtype: data type to load in; None is the model's own.
        dequantize: same as in `open_source`.

    Raises:
        CheckpointError: a file is missing or damaged, or a parameter of the model is not in the checkpoint.
        UnsupportedModelError: weights are quantized in a way that cannot be read.
    """
    state = _plain_state(location, dtype or model.dtype, lambda: model, dequantize)
    vars(model.config).pop("quantization_config", None)
    built = model_of(type(model), model.config, location, dtype or model.dtype, {}, state)
    tensors = all_tensors(built)
    for name, tensor in all_tensors(model).items():
        if tensor.device.type != "meta":
            continue
        if name not in tensors or tensors[name].shape != tensor.shape:
            actual = list(tensors[name].shape) if name in tensors else "nothing"
            raise CheckpointError(
                f"{location} holds {actual} for {name} {list(tensor.shape)} of {type(model).__name__}"
            )
        set_tensor(model, name, tensors[name], not isinstance(tensor, torch.nn.Parameter))


def _plain_state(
    location: Location, dtype: torch.dtype, plain: Callable[[], PreTrainedModel], dequantize: bool
) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint, under the names of a plain one if it is quantized."""
    state, said = lazy_state(location), stored_quantization(location)
    return (
        state if said is None else unpacked(StoredTensors(state, said, location, dtype, plain, dequantize=dequantize))
    )


def _on_meta(cls: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return cls._from_config(copy.deepcopy(config))


def model_of(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    location: object,
    dtype: torch.dtype | str,
    options: Mapping[str, Any],
    state: dict[str, LazyTensor],
) -> PreTrainedModel:
    """Return a model of a class whose weights are those of a state that has not been read.

    Args:
        location: origin of the state, for errors.
        dtype, options: arguments of `from_pretrained`.

    Raises:
        CheckpointError: they do not belong together.
    """
    ignores_shapes = options.get("ignore_mismatched_sizes", False)
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would count tensors of which none is read
    log = logging.get_logger("transformers.modeling_utils")

    def named(record: Any) -> bool:
        """transformers reports missing and unexpected keys of a checkpoint whose path it was not given."""
        record.msg = str(record.msg).replace("from: None\n", f"from: {location}\n")
        return True

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
    if not ignores_shapes:
        _refuse_wrong_shapes(info["mismatched_keys"], state, location)
    _refuse_flipped_names(info["missing_keys"], info["unexpected_keys"], state, location)
    _refuse_codes(model, info["missing_keys"], info["unexpected_keys"], state, location)
    return model


def _refuse_wrong_shapes(mismatched: Iterable[tuple], state: dict[str, LazyTensor], location: object) -> None:
    for name, actual, wanted in mismatched:
        # A converted tensor comes from several; then the directory has to do.
        where = _path_of(state[name], location) if name in state else location
        raise CheckpointError(f"{where} holds {list(actual)} for {name}, and the configuration says {list(wanted)}")


def _refuse_flipped_names(
    missing: Iterable[str], unexpected: Iterable[str], state: dict[str, LazyTensor], location: object
) -> None:
    """A missing name of which another is one bit away was damaged; drawing random weights for it helps nobody."""
    stored = set(unexpected)
    for name in missing:
        for index, letter in enumerate(name):
            for bit in range(8):
                other = f"{name[:index]}{chr(ord(letter) ^ (1 << bit))}{name[index + 1 :]}"
                if other in stored and other in state:
                    raise CheckpointError(
                        f"{_path_of(state[other], location)} is damaged: it says {other!r} for {name}"
                    )


def _refuse_codes(
    model: PreTrainedModel,
    missing: Iterable[str],
    unexpected: Iterable[str],
    state: dict[str, LazyTensor],
    location: object,
) -> None:
    """Raise for a weight of few bits without a description of its numbers."""
    lacking = {name.rpartition(".")[0] for name in missing}
    beside = [name for name in unexpected if name in state and name.rpartition(".")[0] in lacking]
    stored = {name: [state[name].node] for name in beside}
    for name, weight in model.named_parameters():
        if isinstance(weight, LazyTensor) and weight.is_floating_point():
            stored[name] = list(leaves(weight.node, computed=False))
    for name, nodes in stored.items():
        for node in nodes:
            if not node.dtype.is_floating_point or node.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{location} holds {name} as {node.dtype}, and its configuration does not say what that stands for:"
                    " quantization_config is missing, or wrong"
                )


def _path_of(tensor: LazyTensor, location: object) -> object:
    return next((leaf.file.path for leaf in leaves(tensor.node) if isinstance(leaf, FileLeaf)), location)


def prepare_conversions() -> None:
    """Make transformers' table of renamed parameters, which the first load of a process otherwise waits for."""
    get_checkpoint_conversion_mapping("")


def lazy_state(location: Location) -> dict[str, LazyTensor]:
    """Return all stored tensors by their names in the checkpoint, none of them read.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if is_sharded_directory(location.directory):
        return {name: LazyTensor(node) for name, node in open_sharded(location.directory).items()}
    return {leaf.key: LazyTensor(leaf) for file in open_weights(location) for leaf in file_leaves(file)}
