"""Saving a model as it is cut, and cutting a checkpoint that no process loads."""

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
from parallelformers_ng.checkpoint.writing import parse_size, replaced_directory
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.model.parallelized import deployment_of
from parallelformers_ng.options import read_quantize
from parallelformers_ng.sharding.active_adapters import layers_with_adapters
from parallelformers_ng.sharding.builder import build_plan


def save_sharded(
    model: PreTrainedModel,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    progress: bool = True,
) -> None:
    """Save a parallelized model as it is cut: every rank writes its own files, all at once.

    `parallelize(directory)` starts from them, each rank from its own; with another `num_gpus` they are cut anew. An
    earlier save in `directory` is replaced in one step at the end; until then, and after any failure, it is whole.

    Args:
        model: a parallelized model.
        directory: target folder.
        max_shard_size: bytes of a file, as a number or as "5GB"; a larger tensor has a file of its own.
        progress: show a progress bar where standard error is a terminal.

    Raises:
        NotParallelizedError: the model is not parallelized.
        ParallelError: it has adapters.
        CheckpointError: `directory` holds something else, or `max_shard_size` is no size.
        OSError: the disk is full, or the directory cannot be written to.
    """
    if layers_with_adapters(model):
        raise ParallelError(
            f"{type(model).__name__} has adapters, which no sharded directory holds; save_pretrained writes them, and"
            " a merged model (merge_and_unload) can be saved as it is cut"
        )
    deployment = deployment_of(model)
    limit = parse_size(max_shard_size)
    plan = deployment.plan
    names = saved_names(model, plan)
    # Rank 0 reports for all, as they write at the same time; it writes what all hold whole, too.
    stored = plan.held
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
    """Cut a checkpoint into a sharded directory without starting workers, one tensor in memory at a time.

    Args:
        source: a directory or a model id of the hub.
        directory: target folder.
        num_gpus: number of ranks.
        max_shard_size: same as in `save_sharded`.
        dtype: data type to save in; None as `from_pretrained` chooses.
        quantize: hold weights in few bits, as in `parallelize`.
        progress: show a progress bar where standard error is a terminal.
        options: arguments of `from_pretrained`, as in `parallelize`.

    Raises:
        CheckpointError: a file of the source is missing or damaged, or `directory` holds something else.
        UnsupportedModelError: no policy fits the model.
        OSError: the disk is full, or the directory cannot be written to.
    """
    bits = read_quantize(quantize)
    model = load_skeleton(source, dtype, dequantize=bits is not None and bits.dequantize, **options)
    plan = build_plan(model, num_gpus, select(model, None, num_gpus), quantize=bits)
    shard_checkpoint(model, plan, directory, max_shard_size, progress)
