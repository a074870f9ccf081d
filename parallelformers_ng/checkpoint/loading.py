"""Makes a model with unread weights from a path or a hub id: each tensor knows the place of its bytes in a file.

In the parent, transformers' `from_pretrained` runs on lazy tensors (`lazy.py`). So transformers itself handles names,
conversions, ties, missing and unexpected keys, casts and reports.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from parallelformers_ng.checkpoint.encoded import stored_nodes
from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.checkpoint.formats.stored_tensors import StoredTensors
from parallelformers_ng.checkpoint.formats.unpacking import unpacked
from parallelformers_ng.checkpoint.lazy import LazyTensor
from parallelformers_ng.checkpoint.location import Location, Source, open_weights, read_source, stored_quantization
from parallelformers_ng.checkpoint.model_class import class_of, on_meta
from parallelformers_ng.checkpoint.nodes import Node, leaves, release
from parallelformers_ng.checkpoint.reading import lies_in_file
from parallelformers_ng.checkpoint.sharded_directory import is_sharded_directory, open_sharded
from parallelformers_ng.checkpoint.store import ShardStore, names_of_each, place
from parallelformers_ng.errors import CheckpointError
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tensors import all_tensors, get_tensor, set_tensor

State = dict[str, LazyTensor]  # name in the checkpoint → lazy tensor that reads the values later


class Checkpoint:
    """The tensors of a model that are read from checkpoint files.

    Args:
        nodes: name of a parameter or buffer → expression that reads it. Tensors that are not in `nodes` are in memory.
        copied: names in `nodes` of the tensors that the caller's process reads and copies to the `ShardStore`. The
            ranks read all others themselves.
    """

    def __init__(self, nodes: Mapping[str, Node], copied: Collection[str] = ()) -> None:
        self.nodes = dict(nodes)
        self.copied = frozenset(copied)

    @classmethod
    def take(cls, model: PreTrainedModel, plan: ShardPlan) -> Checkpoint:
        nodes: dict[str, Node] = {}
        for names in names_of_each(model, plan):
            of_model = get_tensor(model, names[0], plan.tensors[names[0]].is_buffer)
            if isinstance(of_model, LazyTensor):
                nodes.update(dict.fromkeys(names, of_model.node))
                place(model, names, plan, torch.empty(of_model.shape, dtype=of_model.dtype, device="meta"))
        return cls(nodes, [tensor.name for tensor in plan.stored() if _must_be_copied(tensor, plan, nodes)])

    def of_model(self, plan: ShardPlan) -> list[str]:
        """Return the names of tensors that are not in the checkpoint: missing parameters and computed buffers."""
        return [name for name, tensor in plan.tensors.items() if tensor.storage not in self.nodes]

    def as_stored(self, plan: ShardPlan) -> Checkpoint:
        """Return the checkpoint with quantized numbers and scales instead of each tensor that the plan quantizes."""
        nodes: dict[str, Node] = {}
        for name, node in self.nodes.items():
            nodes |= stored_nodes(plan, name, node)
        return Checkpoint(nodes, [part.name for name in self.copied for part in plan.parts(name)])

    def in_memory(self, plan: ShardPlan) -> ShardPlan:
        """Return a plan of only the tensors that ranks do not read from the checkpoint, but get from the caller."""
        tensors = {name: tensor for name, tensor in plan.tensors.items() if not self.is_read(tensor)}
        return dataclasses.replace(plan, tensors=tensors)

    def is_read(self, tensor: TensorPlan) -> bool:
        return tensor.storage in self.nodes and tensor.storage not in self.copied

    def copy(self, store: ShardStore) -> None:
        for name in self.copied:
            node = self.nodes[name]
            store.write(store.plan.tensors[name], node)
            release(node)


def _must_be_copied(tensor: TensorPlan, plan: ShardPlan, nodes: Mapping[str, Node]) -> bool:
    """Whether the caller's process must copy a tensor to the `ShardStore`: a CPU rank offloads its shard to RAM, or a
    rank offloads its shard to disk and no contiguous range of the checkpoint file has the bytes of the shard."""
    if plan.tiers is None or tensor.name not in nodes:
        return False
    for rank, shard in enumerate(tensor.shards):
        place = plan.tiers.place(tensor.name, rank)
        if place == "cpu" and not plan.tiers.is_cuda:
            return True
        is_in_file = tensor.name not in plan.quantized and lies_in_file(nodes[tensor.name], shard, rank)
        if place == "disk" and not is_in_file:
            return True
    return False


def open_source(source: Source, model: Any, dtype: torch.dtype | None, dequantize: bool) -> PreTrainedModel:
    """Return a model in evaluation mode whose weights are lazy tensors. No weights are read.

    If the source has a configuration, the model is new. Otherwise it is `model`, filled by `fill_skeleton`. The
    function removes `quantization_config` from the configuration.

    Args:
        dtype: data type of the loaded weights; None for the default of `from_pretrained`, or for the data type of
            `model`.
        dequantize: whether weights may be dequantized if no kernel can compute with their format.
    """
    location, config = source.location, source.config
    if config is None:
        fill_skeleton(model, location, dtype, dequantize)
        return model.eval()  # `from_pretrained` does so too; dropout would change the outputs
    cls = source.model_class or class_of(config, location, source.trust_remote_code)
    plain = functools.partial(on_meta, cls, config)
    state = _contents(location, dtype or config.dtype or torch.bfloat16, plain, dequantize)
    vars(config).pop("quantization_config", None)  # because the lazy weights are unquantized for transformers
    built = model_of(cls, config, location, state, dtype="auto" if dtype is None else dtype, **source.options)
    built.config.name_or_path = built.name_or_path = location.path
    if built.can_generate():
        download = {**location.download, "force_download": False, "proxies": None}
        built.adjust_generation_fn(None, None, None, location.path, trust_remote_code=False, **download)
    return built


def load_skeleton(
    path: str,
    dtype: torch.dtype | None = None,
    model_class: type[PreTrainedModel] | None = None,
    dequantize: bool = False,
    **options: Any,
) -> PreTrainedModel:
    return open_source(read_source(path, options, model_class), None, dtype, dequantize)


def fill_skeleton(model: PreTrainedModel, location: Location, dtype: torch.dtype | None, dequantize: bool) -> None:
    """Replace the `meta` tensors of a model by lazy tensors of a checkpoint. Tensors that have values stay."""
    state = _contents(location, dtype or model.dtype, lambda: model, dequantize)
    vars(model.config).pop("quantization_config", None)
    tensors = all_tensors(model_of(type(model), model.config, location, state, dtype=dtype or model.dtype))
    for name, tensor in all_tensors(model).items():
        if tensor.device.type != "meta":
            continue
        if name not in tensors or tensors[name].shape != tensor.shape:
            actual = f"has shape {list(tensors[name].shape)} for" if name in tensors else "does not contain"
            wanted = f"{name}, which has shape {list(tensor.shape)} in {type(model).__name__}"
            raise CheckpointError(f"{location} {actual} {wanted}")
        set_tensor(model, name, tensors[name], not isinstance(tensor, torch.nn.Parameter))


def _contents(location: Location, dtype: torch.dtype, plain: Callable[[], PreTrainedModel], dequantize: bool) -> State:
    """Return a checkpoint's tensors as lazy tensors. A quantized weight has the name and shape of its unquantized form.
    `plain` makes the model without quantization, and `dtype` is the data type of dequantized weights."""
    if is_sharded_directory(location.directory):
        state = {name: LazyTensor(node) for name, node in open_sharded(location.directory).items()}
    else:
        state = {
            key: LazyTensor(FileLeaf(shape, dtype, file, key))
            for file in open_weights(location)
            for key, (shape, dtype) in file.entries.items()
        }
    if (quantization := stored_quantization(location)) is None:
        return state
    return unpacked(StoredTensors(state, quantization, location, dtype, plain, dequantize=dequantize))


def model_of(
    cls: type[PreTrainedModel], config: PretrainedConfig, location: object, state: State, **options: Any
) -> PreTrainedModel:
    """Build a model whose weights are lazy tensors, by `from_pretrained` with the state dict `state`."""
    ignores_shapes = options.get("ignore_mismatched_sizes", False)
    shows = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the bar would count lazy tensors, which are not read yet
    log = logging.get_logger("transformers.modeling_utils")

    def named(record: Any) -> bool:
        """Insert the location of the checkpoint into a log record of transformers about missing or unexpected keys."""
        record.msg = str(record.msg).replace("from: None\n", f"from: {location}\n")
        return True

    log.addFilter(named)
    # The code below raises an error for mismatched sizes instead, with the name of the file.
    options = {"ignore_mismatched_sizes": True, **options, "output_loading_info": True}
    try:
        model, info = cls.from_pretrained(None, config=config, state_dict=state, **options)
    except RuntimeError as error:
        raise CheckpointError(f"{location} cannot be converted to {cls.__name__}: {error}") from error
    finally:
        log.removeFilter(named)
        if shows:
            logging.enable_progress_bar()
    for name, actual, wanted in () if ignores_shapes else info["mismatched_keys"]:
        # If several stored tensors become one, the name is not in `state`, and the error names the whole checkpoint.
        where = _path_of(state[name], location) if name in state else location
        raise CheckpointError(f"{where} has shape {list(actual)} for {name}, but the configuration has {list(wanted)}")
    _refuse_flipped_names(info, state, location)
    _refuse_codes(model, info, state, location)
    return model


def _refuse_flipped_names(info: Mapping[str, Any], state: State, location: object) -> None:
    """Raise CheckpointError if a stored name differs from a missing name in one bit, because the file is damaged."""
    stored = state.keys() & info["unexpected_keys"]
    for name in info["missing_keys"]:
        for index, letter in enumerate(name):
            for bit in range(8):
                other = f"{name[:index]}{chr(ord(letter) ^ (1 << bit))}{name[index + 1 :]}"
                if other in stored:
                    raise CheckpointError(
                        f"{_path_of(state[other], location)} is damaged: the stored name {other!r} must be {name!r}"
                    )


def _refuse_codes(model: PreTrainedModel, info: Mapping[str, Any], state: State, location: object) -> None:
    """Raise CheckpointError if the checkpoint stores quantized weights that its configuration does not describe."""
    lacking = {name.rpartition(".")[0] for name in info["missing_keys"]}
    unexpected = [name for name in info["unexpected_keys"] if name in state and name.rpartition(".")[0] in lacking]
    stored = {name: [state[name].node] for name in unexpected}
    for name, weight in model.named_parameters():
        if isinstance(weight, LazyTensor) and weight.is_floating_point():
            stored[name] = list(leaves(weight.node, computed=False))
    for name, nodes in stored.items():
        for node in nodes:
            if not node.dtype.is_floating_point or node.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{location} stores {name} as {node.dtype}, but its configuration does not describe this format:"
                    " quantization_config is missing or wrong"
                )


def _path_of(tensor: LazyTensor, location: object) -> object:
    return next((leaf.file.path for leaf in leaves(tensor.node) if isinstance(leaf, FileLeaf)), location)
