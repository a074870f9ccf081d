"""Saves a parallelized model as an ordinary checkpoint, and converts a checkpoint to a sharded directory."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from parallelformers_ng.checkpoint import sharded_directory
from parallelformers_ng.checkpoint.lazy import LazyTensor, RemoteTensor
from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.nodes import Node, leaf_of
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.reading import read_copy
from parallelformers_ng.checkpoint.writing import replaced_directory, split_into_files, write_safetensors
from parallelformers_ng.option_checks import parse_size
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensor_plan import TensorPlan
from parallelformers_ng.sharding.tensors import get_tensor


def write_pretrained(
    model: PreTrainedModel,
    nodes: Mapping[str, Node],
    directory: Path,
    max_shard_size: int | str = "50GB",
    save_original_format: bool = True,
    progress: bool = True,
) -> None:
    """Write an ordinary checkpoint of a model whose weights are not in this process, one tensor at a time.

    Files get temporary names until all weights are written, so an error while writing weights does not damage an
    earlier checkpoint in `directory`. The index is written after the weights. At the end, the weight files of the
    earlier checkpoint are deleted.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: _shape_of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    for ignored in model._keys_to_ignore_on_save or ():
        state.pop(ignored, None)
    state = remove_tied_weights_from_state_dict(state, model)
    lazy = {name: LazyTensor(nodes[name]) if name in nodes else tensor for name, tensor in state.items()}
    if save_original_format:
        lazy = revert_weight_conversion(model, lazy)
    stem = SAFE_WEIGHTS_NAME.removesuffix(".safetensors")
    split = split_into_files(lazy, stem, parse_size(max_shard_size), lambda tensor: tensor.nbytes)
    total = sum(tensor.nbytes for tensor in lazy.values())
    partials = {name: directory / f".{name}.partial" for name in split.filename_to_tensors}
    try:
        with progress_bar(f"saving {type(model).__name__}", total, progress) as advance:
            for name, keys in split.filename_to_tensors.items():
                entries = {key: (tuple(lazy[key].shape), lazy[key].dtype) for key in keys}
                write_safetensors(partials[name], entries, lambda key: _values(lazy[key]), advance)
        for name, partial in partials.items():
            partial.replace(directory / name)
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
    index_path = directory / SAFE_WEIGHTS_INDEX_NAME
    if split.is_sharded:
        index = {"metadata": {"total_size": total, **split.metadata}, "weight_map": split.tensor_to_filename}
        partial = directory / f".{index_path.name}.partial"
        partial.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
        partial.replace(index_path)
    else:
        index_path.unlink(missing_ok=True)
    sharded_directory.write_configs(model, directory)
    for file in directory.glob(f"{stem}*.safetensors"):
        # Delete weight files of an earlier save, because `from_pretrained` might read them instead of the new files.
        if file.name not in split.filename_to_tensors and re.fullmatch(rf"{stem}(-\d{{5}}-of-\d{{5}})?", file.stem):
            file.unlink()


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return read_copy(tensor.node, {}) if isinstance(tensor, LazyTensor) else tensor


def _shape_of(tensor: Any) -> Any:
    """Replace a tensor on the workers by a `meta` tensor, so that transformers finds ties without reading weights."""
    return torch.empty_like(tensor, device="meta") if isinstance(tensor, RemoteTensor) else tensor


def shard_checkpoint(model: PreTrainedModel, plan: ShardPlan, directory: Path, limit: int, progress: bool) -> None:
    """Convert a checkpoint to a sharded directory in this process, with one tensor in memory at a time."""
    names = sharded_directory.saved_names(model, plan)
    nodes = Checkpoint.take(model, plan).nodes
    for tensor in plan.stored():
        if tensor.name not in nodes:
            nodes[tensor.name] = leaf_of(get_tensor(model, tensor.name, tensor.is_buffer))
    nodes, stored = Checkpoint(nodes).as_stored(plan).nodes, plan.as_stored
    total = sum(stored.tensors[name].bytes_on(rank) for name in names for rank in range(plan.world_size))
    with (
        replaced_directory(directory, sharded_directory.files_of) as partial,
        progress_bar(f"cutting {type(model).__name__}", total, progress) as advance,
    ):
        written = []
        for rank in range(plan.world_size):

            def part(tensor: TensorPlan, rank: int = rank) -> torch.Tensor:
                shard = tensor.shards[rank]
                return read_copy(nodes[tensor.name], {} if shard.dim is None else {shard.dim: shard.ranges})

            written.append(sharded_directory.write_rank(partial, stored, names, rank, limit, part, advance))
        sharded_directory.write_index(partial, model, plan, names, written)
