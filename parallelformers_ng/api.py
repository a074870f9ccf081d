"""The entry point: check the arguments, make the plan, start the group, hand the weights over."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel

from parallelformers_ng.autopolicy.proof import prove_custom
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.checkpoint.location import Location, check_directory
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.source import Checkpoint, fill_skeleton, load_skeleton, prepare_conversions
from parallelformers_ng.cuda_graphs.modes import static_steps
from parallelformers_ng.errors import (
    AlreadyParallelizedError,
    ParallelError,
    PlacementError,
    UnsupportedModelError,
)
from parallelformers_ng.model.deployment import RUNNER, Deployment
from parallelformers_ng.model.parallelized import enter, is_parallelized
from parallelformers_ng.runtime.deadline import checked_seconds
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.placement import check_count, check_platform, placement
from parallelformers_ng.runtime.startup import check_backend
from parallelformers_ng.runtime.supervisor import RestartLimit
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.casting import holds_plain_weights
from parallelformers_ng.sharding.inject import settle
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import Policy
from parallelformers_ng.sharding.registry import check_custom, written_policies

log = logging.getLogger("parallelformers_ng")

CustomPolicies = type[Policy] | Sequence[type[Policy]] | None

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def parallelize(
    model: PreTrainedModel | str | os.PathLike[str],
    num_gpus: int | None = None,
    fp16: bool = False,
    *,
    weights: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
    device: str = "auto",
    device_ids: Sequence[int] | None = None,
    custom_policies: CustomPolicies = None,
    prove: bool = True,
    verbose: Literal["simple", "detail"] | None = None,
    seed: int | None = None,
    compile: bool | CompileConfig = False,
    cuda_graphs: bool = False,
    backend: str = "auto",
    timeout: float = 600.0,
    start_timeout: float = 120.0,
    group: WorkerGroup | None = None,
    host_copy: bool = False,
    restart: bool = True,
    max_restarts: int = 3,
    restart_window: float = 60.0,
    model_class: type[PreTrainedModel] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    subfolder: str = "",
    variant: str | None = None,
    trust_remote_code: bool = False,
    load_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> Any:
    """Cut `model` over several devices, one worker process each, in place.

    Afterwards `model(...)` and `model.generate(...)` run on the workers, from any thread; `model.deparallelize()` (or
    `.cpu()`, `.cuda()`, `.to()`) ends it and brings the weights back.

    Args:
        model: a transformers model with its weights loaded; or a directory or model id of the hub, whose weights each
            worker then reads its share of; or a model on `meta`, with `weights`.
        num_gpus: number of workers. None: all visible GPUs, or 2 CPU workers where there is none.
        fp16: cast floating-point weights to float16, as `from_pretrained(dtype=torch.float16)` would.
        weights: the directory or model id that has the weights of a model on `meta`.
        dtype: cast to this type instead ("bfloat16", torch.bfloat16, …); must agree with `fp16`. "auto", as None: as
            `from_pretrained` chooses, or as the model is.
        device: "cuda", "cpu", or "auto": CUDA where present, else CPU.
        device_ids: the CUDA device of each rank; by default 0, 1, 2, ….
        custom_policies: a Policy class or a list of them; they come before the written ones.
        prove: accept custom policies only if a tiny random twin of the model gives, cut by them, what it gives whole:
            seconds of one core, once for a policy, a configuration and a number of ranks. False: trust them.
        verbose: print the memory of every device, "simple" (a line each) or "detail" (a table each).
        seed: seeds the model's own random stream; by default sampling follows the caller's torch generator.
        compile: run the decode steps of `generate` through `torch.compile`, over caches of a fixed size; how, as
            transformers' `CompileConfig` says it. The first call waits for the compiler.
        cuda_graphs: capture the decode steps of `generate` in CUDA graphs, over caches of a fixed size, instead of
            compiling them; what cannot be captured runs as it is, and a warning says why, once. Without a CUDA device
            it does nothing but say so. Never run on a GPU: unmeasured.
        backend: of the collectives: "auto", "shared_memory", "gloo" or "nccl".
        timeout: seconds that a request may take.
        start_timeout: seconds until the workers must be ready.
        group: workers from `start_group` to use instead of new ones; they serve one model at a time and go on running
            when its parallelization ends. `num_gpus`, `device`, `backend` and the timeouts are then the group's.
        host_copy: on CUDA, keep a copy of the shards in host memory, from which workers can be restarted. On CPU that
            memory is the shards, and is always kept.
        restart: start new workers when one died, where the weights are kept.
        max_restarts: more than this many within `restart_window` seconds, and the model stays down.
        model_class: the class to load a path as; by default the first of its configuration's `architectures`.
        revision, token, cache_dir, local_files_only, subfolder, variant, trust_remote_code: as in `from_pretrained`.
        load_options: its further arguments: `{"attn_implementation": "eager", "key_mapping": …}`.
        progress: show a progress bar where standard error is a terminal, now and when weights are gathered.

    Returns:
        The same model, or the one that was loaded.

    Raises:
        UnsupportedModelError: not a transformers model, or no policy fits it.
        CheckpointError: a file of the checkpoint is missing or damaged; it is named.
        AlreadyParallelizedError: the model is parallelized.
        PlacementError: there are not as many devices as asked for.
        PolicyError: a custom policy does not fit the model, or is wrong, or cannot be proven.
        StartupError: a worker could not start. The model is as it was before.
        SharedMemoryError: the system has no memory for the shards. The model is as it was before.
        ParallelError: another argument has a value that it does not take.
    """
    if verbose not in (None, "simple", "detail"):
        raise ParallelError(f"verbose is {verbose!r}; it takes 'simple', 'detail' or None")
    if group is None:
        make_group = _group_maker(num_gpus, device, device_ids, backend, timeout, start_timeout)
        world_size, kind = make_group.args
    else:
        make_group, world_size, kind = None, group.world_size, group.device_names[0].partition(":")[0]
        if num_gpus not in (None, world_size):
            raise PlacementError(f"num_gpus is {num_gpus}, but the group given has {world_size} workers")
    target = _target_dtype(fp16, dtype)
    steps, unlike_asked = static_steps(compile, cuda_graphs, kind, world_size)
    if unlike_asked:
        log.warning("generate runs without CUDA graphs: %s", unlike_asked)
    location = None
    if weights is not None or isinstance(model, (str, os.PathLike)):
        place = os.fspath(model if weights is None else weights)
        cache = None if cache_dir is None else os.fspath(cache_dir)
        location = Location(place, revision, token, cache, local_files_only, subfolder, variant)
        check_directory(location)
    if not isinstance(model, (str, os.PathLike)):
        _check_model(model)
    loaded: Any = model
    workers = group if make_group is None else make_group(wait=False)  # they import torch while this process plans
    assert workers is not None
    try:
        if location is not None:
            loaded = _open(model, location, model_class, target, trust_remote_code, load_options)
        sharding = _make_plan(loaded, world_size, custom_policies, target)
        if prove and custom_policies is not None:
            prove_custom(loaded, check_custom(custom_policies), world_size)
        deployment = Deployment(
            loaded,
            sharding,
            workers,
            make_group,
            keep_weights=kind == "cpu" or host_copy,
            restart=restart,
            limit=RestartLimit(max_restarts, restart_window),
            checkpoint=None if location is None else Checkpoint.take(loaded, sharding),
            show_progress=progress,
        )
        what = "cutting" if location is None else "loading"
        with progress_bar(f"{what} {type(loaded).__name__}", sharding.bytes_whole, progress) as advance:
            deployment.start(loaded, advance)
    except BaseException:
        if make_group is not None:
            workers.close()
        raise
    settle(loaded, sharding)
    if getattr(loaded, "is_quantized", False):  # a mark alone, which would keep it from being saved
        loaded.hf_quantizer.remove_quantization_config(loaded)
    enter(loaded, deployment, seed, steps)
    if verbose is not None:
        print(loaded.memory_summary(detail=verbose == "detail"))
    return loaded


def start_group(
    num_gpus: int | None = None,
    *,
    device: str = "auto",
    device_ids: Sequence[int] | None = None,
    backend: str = "auto",
    timeout: float = 600.0,
    start_timeout: float = 120.0,
) -> WorkerGroup:
    """Start workers that serve one model after another, so that only the first pays for their start.

    `with start_group(2) as group: parallelize(model, group=group)`. The arguments are those of `parallelize`.

    Raises:
        PlacementError: there are not as many devices as asked for.
        StartupError: a worker could not start.
    """
    group = _group_maker(num_gpus, device, device_ids, backend, timeout, start_timeout)(wait=False)
    try:
        # While the workers import torch, this process makes ready what it will plan and load with.
        written_policies()
        prepare_conversions()
        group.wait_until_ready()
    except BaseException:
        group.close()
        raise
    return group


def plan(
    model: PreTrainedModel,
    num_gpus: int = 2,
    fp16: bool = False,
    *,
    dtype: torch.dtype | str | None = None,
    custom_policies: CustomPolicies = None,
) -> ShardPlan:
    """How `parallelize` would cut `model`, without starting anything. A model on `meta` will do.

    Args:
        model: a transformers model.
        num_gpus: number of ranks.
        fp16, dtype: as in `parallelize`; they decide the bytes.
        custom_policies: as in `parallelize`.

    Returns:
        The plan: `bytes_per_rank`, `replicated`, `policy`, `source`; `print` shows it as a table.

    Raises:
        UnsupportedModelError: not a transformers model, or no policy fits it.
        PolicyError: a policy does not fit the model.
    """
    check_count(num_gpus)
    return _make_plan(model, num_gpus, custom_policies, _target_dtype(fp16, dtype))


def _open(
    model: Any,
    location: Location,
    model_class: type[PreTrainedModel] | None,
    dtype: torch.dtype | None,
    trust_remote_code: bool,
    options: Mapping[str, Any] | None,
) -> PreTrainedModel:
    """A model whose weights have not been read yet."""
    if isinstance(model, PreTrainedModel):
        fill_skeleton(model, location, dtype)
        return model
    return load_skeleton(
        location, model_class=model_class, dtype=dtype, trust_remote_code=trust_remote_code, options=options
    )


def _group_maker(
    num_gpus: int | None,
    device: str,
    device_ids: Sequence[int] | None,
    backend: str,
    timeout: float,
    start_timeout: float,
) -> functools.partial[WorkerGroup]:
    """Check where the workers go; starting them is left to the caller, who may have to do it again."""
    check_platform()
    world_size, kind = placement(num_gpus, device, device_ids)
    check_backend(backend, kind, device_ids)
    checked_seconds(timeout, "timeout")
    checked_seconds(start_timeout, "start_timeout")
    return functools.partial(
        WorkerGroup,
        world_size,
        kind,
        target=RUNNER,
        device_ids=device_ids,
        backend=backend,
        timeout=timeout,
        start_timeout=start_timeout,
    )


def _check_model(model: nn.Module) -> None:
    if is_parallelized(model):
        raise AlreadyParallelizedError(f"{type(model).__name__} is parallelized already; call deparallelize() first")
    if not isinstance(model, PreTrainedModel):
        cls = type(model)
        hint = "; pass what its merge_and_unload() returns" if hasattr(model, "merge_and_unload") else ""
        raise UnsupportedModelError(
            f"parallelize takes a transformers PreTrainedModel, not {cls.__module__}.{cls.__name__}{hint}"
        )
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread by device_map={model.hf_device_map}; load it without device_map"
        )
    if getattr(model, "is_quantized", False) and not holds_plain_weights(model):
        raise UnsupportedModelError(f"{type(model).__name__} is quantized; quantized weights cannot be cut yet")


def _make_plan(model: nn.Module, world_size: int, custom: CustomPolicies, dtype: torch.dtype | None) -> ShardPlan:
    _check_model(model)
    made = build_plan(model, world_size, select(model, custom, world_size), dtype)
    if made.warning:
        log.warning("%s", made.warning)
    return made


def _target_dtype(fp16: bool, dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype == "auto":
        dtype = None
    if isinstance(dtype, str):
        name = dtype.removeprefix("torch.")
        if name not in _DTYPES:
            raise ParallelError(f"dtype is {dtype!r}; it takes one of {', '.join(_DTYPES)}")
        dtype = _DTYPES[name]
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise ParallelError(f"dtype is {dtype!r}; it takes a floating-point torch.dtype")
    if fp16 and dtype not in (None, torch.float16):
        raise ParallelError(f"fp16=True and dtype={dtype} contradict each other; give one of them")
    return torch.float16 if fp16 else dtype
