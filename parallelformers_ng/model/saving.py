"""Saves a parallelized model as shards, and cuts a checkpoint into shards without loading the whole model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.checkpoint.loading import load_skeleton
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.save_pretrained import shard_checkpoint
from parallelformers_ng.checkpoint.sharded_directory import files_of, saved_names, write_index
from parallelformers_ng.checkpoint.writing import replaced_directory
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.option_checks import parse_size
from parallelformers_ng.options import read_quantize
from parallelformers_ng.runtime.placement import check_count
from parallelformers_ng.sharding.active_adapters import layers_with_adapters
from parallelformers_ng.sharding.builder import build_plan


def save_sharded(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    progress: bool = True,
) -> None:
    """Save the shards of a parallelized model; every rank writes its own files at the same time.

    `parallelize(directory)` loads the files; each rank reads its own files if `num_gpus` is unchanged, otherwise the
    model is cut again. An earlier save in `directory` is replaced in one step at the end; a failure leaves the earlier
    save intact.

    Args:
        model: a parallelized model.
        directory: target folder.
        max_shard_size: maximum size of a file, as a number of bytes or as text such as "5GB"; a larger tensor gets a
            file of its own.
        progress: whether to show a progress bar if standard error is a terminal.

    Raises:
        NotParallelizedError: the model is not parallelized.
        ParallelError: the model has adapters.
        CheckpointError: `directory` has files of another kind, or `max_shard_size` is not a size.
        OSError: the disk is full, or the directory cannot be written to.
        GroupError: a rank failed or has ended.
    """
    if layers_with_adapters(model):
        raise ParallelError(
            f"{type(model).__name__} has adapters, which save_sharded cannot write; use save_pretrained, or merge the"
            " adapters before parallelize (merge_and_unload)"
        )
    deployment = deployment_of(model)
    limit = parse_size(max_shard_size)
    plan = deployment.plan
    names = saved_names(model, plan)
    # The bar counts rank 0: all ranks write at the same time, and only rank 0 writes replicated tensors.
    stored = plan.as_stored
    total = sum(stored.tensors[name].bytes_on(0) for name in names)
    with (
        replaced_directory(Path(directory), files_of) as partial,
        progress_bar(f"saving {type(model).__name__}", total, progress) as advance,
    ):
        write_index(partial, model, plan, names, deployment.save(partial, names, limit, advance))


def shard(
    source: str,
    directory: str | os.PathLike[str],
    num_gpus: int,
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    quantize: Any = None,
    progress: bool = True,
    **options: Any,
) -> None:
    """Cut a checkpoint into a sharded directory without workers; only one tensor at a time is in memory.

    Args:
        source: directory, or model id on the hub.
        directory: target folder.
        num_gpus: number of ranks, at least 1.
        max_shard_size: same as in `save_sharded`.
        dtype: data type of the saved weights; with None, `from_pretrained` chooses.
        quantize: quantization of the weights, the same as in `parallelize`.
        progress: whether to show a progress bar if standard error is a terminal.
        options: arguments of `from_pretrained`, the same as in `parallelize`.

    Raises:
        CheckpointError: a file of the source is missing or damaged, or `directory` has files of another kind. Also:
            `max_shard_size` is not a size.
        UnsupportedModelError: no policy fits the model, or the format of its quantized weights cannot be read.
        PolicyError: a policy does not fit the model.
        PlacementError: `num_gpus` is less than 1.
        ParallelError: `quantize` is not a quantization that ranks can compute with, or an option is unknown or not
            supported.
        OSError: the disk is full, or the directory cannot be written to.
    """
    check_count(num_gpus)
    bits = read_quantize(quantize)
    model = load_skeleton(source, dtype, dequantize=bits is not None and bits.dequantize, **options)
    plan = build_plan(model, num_gpus, select(model, None, num_gpus), quantize=bits)
    shard_checkpoint(model, plan, Path(directory), parse_size(max_shard_size), progress)
