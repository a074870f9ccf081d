"""Parallelizes a model: checks the arguments, makes the plan, starts the group and loads the weights on the workers."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.planning import CustomPolicies, check_fit, make_plan
from parallelformers_ng.autopolicy.proof import prove_custom
from parallelformers_ng.checkpoint.loading import Checkpoint, open_source
from parallelformers_ng.checkpoint.location import Source, base_of_adapter, read_source, refuse_options
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.checkpoint.quantized_in_memory import ConvertedLayers, plain_counterpart
from parallelformers_ng.cuda_graphs.modes import Decode, static_steps
from parallelformers_ng.errors import ParallelError, PlacementError
from parallelformers_ng.generation.cache_kinds import check_kind, kind_for
from parallelformers_ng.kernels.decoder_stack import bytes_ahead
from parallelformers_ng.model.around import surround, with_peft_adapters, within
from parallelformers_ng.model.calls import Calls
from parallelformers_ng.model.deployment import Deployment, Replica
from parallelformers_ng.model.groups import group_makers
from parallelformers_ng.model.kinds import check_model
from parallelformers_ng.model.parallelized import Parallelized, enter, forget_end
from parallelformers_ng.offload.assignment import tiers_for
from parallelformers_ng.offload.budgets import Budget, budget_of
from parallelformers_ng.option_checks import check_switches, read_options
from parallelformers_ng.options import (
    BatchingOptions,
    FitOptions,
    QuantizeOptions,
    WorkerOptions,
    read_quantize,
)
from parallelformers_ng.runtime.cores import threads_of_rank
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.placement import check_count
from parallelformers_ng.sharding.casting import target_dtype
from parallelformers_ng.sharding.inject import settle
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy_registry import check_custom

log = logging.getLogger("parallelformers_ng")


def parallelize(
    model: PreTrainedModel | str | os.PathLike[str],
    num_gpus: int | None = None,
    fp16: bool = False,
    *,
    weights: str | os.PathLike[str] | None = None,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | str | None = None,
    custom_policies: CustomPolicies = None,
    adapters: Mapping[str, str | os.PathLike[str]] | None = None,
    workers: WorkerOptions | Mapping[str, Any] | WorkerGroup | None = None,
    fit: FitOptions | Mapping[str, Any] | None = None,
    quantize: Any = None,
    decode: Decode = "auto",
    batching: BatchingOptions | Mapping[str, int] | bool | Literal["auto"] = "auto",
    seed: int | None = None,
    prove: bool = True,
    verbose: Literal["simple", "detail"] | None = None,
    progress: bool = True,
    **load_options: Any,
) -> Any:
    """Divide `model` among several worker processes, one for each device, in place.

    Afterwards `model(...)` and `model.generate(...)` run on the workers, from any thread. `model.deparallelize()` (or
    `.cpu()`, `.cuda()`, `.to()`) ends the workers and restores the weights.

    Args:
        model: a loaded transformers or peft model; a model on `meta`, with `weights`; or a directory or model id of
            the hub, also of a peft adapter. From a path, each worker reads its own shards.
        num_gpus: number of workers. None: all visible GPUs, or 2 CPU workers without a GPU.
        fp16: cast floating-point weights to float16, like `from_pretrained(dtype=torch.float16)`.
        weights: directory or model id with the weights of a model on `meta`. The model is put in evaluation mode.
        model_class: class of the model to load from a path; by default the class that the configuration names.
        dtype: data type to cast floating-point weights to ("bfloat16", torch.bfloat16, …); must agree with `fp16`.
            None or "auto": for a path, the data type that `from_pretrained` chooses; otherwise the model's own.
        custom_policies: a Policy class or a list of Policy classes, tried before the policies of this library.
        adapters: for a path: adapter name → directory or hub name of a peft adapter to load, like `load_adapter`; the
            first adapter is active.
        workers: devices and time limits of the workers, as `WorkerOptions` or a dict of its fields (`{"device":
            "cpu", "timeout": 60}`). Or a group from `start_group`, which sets `num_gpus`, serves one model at a time
            and keeps running after the parallelization ends.
        fit: strategy and memory limits for devices that are small or of different sizes, as `FitOptions` or a dict of
            its fields.
        quantize: scheme in which the ranks hold weights, quantized while loading: "int8", "int4" or "fp8";
            `QuantizeOptions` or a dict of its fields (`{"scheme": "int8", "skip": ["mlp.down_proj"]}`); or a
            weight-only torchao config. docs/quantization.md describes the weights that `deparallelize` restores.
        decode: mode of the decode steps of `generate`. "eager": no compiler, no CUDA graphs. "compile":
            `torch.compile` over a cache of a fixed size; the first call waits for the compiler. A transformers
            `CompileConfig`: "compile" with other settings. "cuda_graphs": CUDA graphs over a cache of a fixed size.
            If a step cannot be captured, the step runs eagerly, and one warning gives the reason. "auto": "eager" on
            CPU ranks; on CUDA, "cuda_graphs" for calls whose output type stays the same, until a capture fails.
        batching: decode concurrent calls of `generate` together: True, False, "auto", `BatchingOptions`, or a dict of
            its fields (`{"rows": 8}`). A call that cannot share a batch (beams, several prompts, a given cache, a
            model whose tokens would change) waits for its turn and runs alone. A concurrent sampling call without
            `seed=` gets its own seed, derived from the random stream (see `seed`). "auto": True from the first two
            concurrent calls on; on CUDA ranks, only if the decode steps become CUDA graphs.
        seed: 64-bit seed of the model's own random stream; by default sampling uses the caller's torch generator.
        prove: accept custom policies only if sharded and whole outputs of a tiny random copy of the model match. The
            check takes seconds of one core, once for each policy, configuration and number of ranks. False: no check.
        verbose: print the memory of every device: "simple" (a line each) or "detail" (a table each).
        progress: show a progress bar while weights are loaded or gathered, if standard error is a terminal.
        load_options: for a path: arguments of `from_pretrained` (`revision`, `token`, `cache_dir`, `local_files_only`,
            `subfolder`, `variant`, `trust_remote_code`, `attn_implementation`, `key_mapping`, …), and changed
            attributes of the configuration (`num_labels=3`).

    Returns:
        `model` itself, or the model loaded from the path.

    Raises:
        UnsupportedModelError: the library does not support the model: for example, no policy fits.
        CheckpointError: a file of the checkpoint is missing or damaged, or an adapter does not fit the model. The
            message names the file or the directory.
        AlreadyParallelizedError: the model is parallelized already.
        PlacementError: the ranks cannot be placed: for example, there are fewer devices than ranks, more than 256 ranks
            on this machine, or the group of `workers` serves another model.
        PolicyError: a custom policy does not fit the model, is wrong, or cannot be proven.
        StartupError: a worker could not start. The model is unchanged.
        SharedMemoryError: the system has too little memory for the shards or the collectives. The model is unchanged.
        NotPortableError: changed code of the model cannot be sent to the workers. The model is unchanged.
        GroupError: a worker raised an exception, ended or missed a time limit, or the group of `workers` has ended. The
            model is unchanged. An error that a worker raised also has its original type.
        ParallelError: an argument has a wrong value or an unknown name, the limits of `fit` are too small, or a hook of
            the model cannot run on the workers.
        UnsupportedPlatformError: the system is not Linux, `/proc` is missing, or gevent has patched Python. Or the
            system does not report its available memory.
        OSError: the shards cannot be written for another reason than memory: for example, too many files are open.
        SystemExit: this process of a torchrun job does not have rank 0.
    """
    check_switches(fp16=fp16, prove=prove, progress=progress)
    if verbose not in (None, "simple", "detail"):
        raise ParallelError(f"verbose is {verbose!r}; it takes 'simple', 'detail' or None")
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 64):  # torch's range of seeds
        raise ParallelError(f"seed is {seed!r}; it takes an integer of 64 bits, or None")
    options = WorkerOptions() if isinstance(workers, WorkerGroup) else read_options(WorkerOptions, workers, "workers")
    makers: list[functools.partial[WorkerGroup]] = []
    fitting = read_options(FitOptions, fit, "fit")
    if isinstance(workers, WorkerGroup):
        world_size, kind = workers.world_size, workers.device
        if num_gpus not in (None, world_size):
            raise PlacementError(f"num_gpus is {num_gpus}, but the group of workers= has {world_size} workers")
        hosts = workers.hosts
        fitting = fitting.over(hosts.counts if hosts else [world_size])
    else:
        makers, fitting = group_makers(num_gpus, options, fitting)
        (world_size, kind), hosts = makers[0].args, makers[0].keywords["hosts"]
    static_decode = None if decode in ("auto", "eager") else decode
    check_fit(fitting, world_size, custom_policies=custom_policies, decode=static_decode)
    target = target_dtype(fp16, dtype)
    check_kind(fitting.cache, kind, decode)
    budget = budget_of(fitting, world_size, kind, options.device_ids, options.replicas)
    eager = fitting.cache is not None or budget is not None
    steps, why_eager = static_steps("eager" if eager else decode, kind, world_size)
    if why_eager:
        log.warning("generate runs without CUDA graphs: %s", why_eager)
    is_path = isinstance(model, (str, os.PathLike))
    directories = {name: os.fspath(directory) for name, directory in (adapters or {}).items()}
    if directories and not is_path:
        raise ParallelError(f"adapters is for loading a path; add adapters to this {type(model).__name__} with peft")
    if is_path and (base := base_of_adapter(model)) is not None:
        directories, model = {"default": os.fspath(model), **directories}, base
    model, wrappers = within(model)
    bits = read_quantize(quantize)
    batch = _batching(batching, kind, decode)
    source = _source(model, weights, model_class, load_options)
    loaded: Any = model
    forget_end(loaded)
    replicas: list[Replica] = []
    original: ConvertedLayers | None = None
    try:
        if isinstance(workers, WorkerGroup):
            replicas.append(Replica(workers, None))
        for maker in makers:  # workers start now, so that they import torch while this process makes the plan
            group = maker(wait=False)
            replicas.append(Replica(group, maker))
        dequantize = bits is not None and bits.dequantize
        if source is not None:
            loaded = open_source(source, model, target, dequantize)
        elif (plain := plain_counterpart(loaded, target, dequantize)) is not None:
            original = ConvertedLayers(loaded, plain)
        if directories:
            loaded, wrappers = within(with_peft_adapters(loaded, directories))
        cpu_ranks = world_size * options.replicas if kind == "cpu" and hosts is None else 0
        sharding = _make_plan(loaded, world_size, custom_policies, target, fitting, bits, budget, cpu_ranks)
        if prove and custom_policies is not None:
            prove_custom(loaded, check_custom(custom_policies), world_size, fitting.parts(world_size))
        files = None if source is None else Checkpoint.take(loaded, sharding)
        deployment = Deployment(
            loaded, sharding, replicas, options=options, checkpoint=files, show_progress=progress, original=original
        )
        verb = "cutting" if source is None else "loading"
        with progress_bar(f"{verb} {type(loaded).__name__}", sharding.bytes_whole, progress) as advance:
            deployment.start(loaded, advance)
    except BaseException:
        for replica in replicas:
            replica.leave()
        if original is not None:
            original.restore()
        raise
    settle(loaded, sharding)
    if getattr(loaded, "is_quantized", False):  # `save_pretrained` would refuse a model with this attribute
        loaded.hf_quantizer.remove_quantization_config(loaded)
    for replica in replicas if sharding.strategy == "tensor" else ():
        replica.steps = steps
    enter(loaded, Calls(loaded, deployment, seed, batch, at_once=batching != "auto"))
    surround(wrappers, loaded)
    if verbose is not None:
        print(Parallelized.memory_summary(loaded, detail=verbose == "detail"))
    return wrappers[0] if wrappers else loaded


def plan(
    model: PreTrainedModel,
    num_gpus: int = 2,
    fp16: bool = False,
    *,
    dtype: torch.dtype | str | None = None,
    custom_policies: CustomPolicies = None,
    fit: FitOptions | Mapping[str, Any] | None = None,
    quantize: Any = None,
) -> ShardPlan:
    """Return the plan by which `parallelize` would divide `model`, without starting workers.

    The function logs a warning if much of the model would be replicated.

    Args:
        model: a transformers model, also without weights on `meta`.
        num_gpus: number of ranks.
        fp16: same as in `parallelize`; changes the sizes in bytes.
        dtype: same as in `parallelize`; changes the sizes in bytes.
        custom_policies: same as in `parallelize`.
        fit: same as in `parallelize`.
        quantize: same as in `parallelize`; changes the sizes in bytes.

    Returns:
        The plan, with `bytes_per_rank`, `replicated`, `policy` and `source`; `print` shows the plan as a table.

    Raises:
        UnsupportedModelError: the library does not support the model: for example, no policy fits.
        AlreadyParallelizedError: the model is parallelized already.
        PolicyError: a policy does not fit the model.
        ParallelError: an argument has a wrong value, or the limits of `fit` are too small for the model.
        PlacementError: `num_gpus` is less than 1, or the model cannot be divided into so many stages.
        CheckpointError: the model is quantized, and its quantization configuration or a tensor is wrong.
        UnsupportedPlatformError: `max_memory` has no size for "cpu", and the system does not report free memory.
    """
    check_count(num_gpus)
    check_switches(fp16=fp16)
    fitting, bits = read_options(FitOptions, fit, "fit"), read_quantize(quantize)
    check_fit(fitting, num_gpus, custom_policies=custom_policies)
    budget = budget_of(fitting, num_gpus, "cuda" if torch.cuda.is_available() else "cpu")
    model, _ = within(model)
    check_model(model)
    target = target_dtype(fp16, dtype)
    plain = plain_counterpart(model, target, bits is not None and bits.dequantize) or model
    cpu_ranks = 0 if torch.cuda.is_available() else num_gpus
    return _make_plan(plain, num_gpus, custom_policies, target, fitting, bits, budget, cpu_ranks)


def _source(
    model: Any,
    weights: str | os.PathLike[str] | None,
    model_class: type[PreTrainedModel] | None,
    options: Mapping[str, Any],
) -> Source | None:
    """Return the checkpoint from which the workers read the weights; None if the weights are in memory already.

    Raises:
        ParallelError: `weights`, `model_class` or a load option has no effect on this model.
    """
    if isinstance(model, (str, os.PathLike)):
        if weights is not None:
            raise ParallelError("weights is for a model on meta; a path already has weights")
        return read_source(os.fspath(model), options, model_class)
    check_model(model)
    if model_class is not None:
        raise ParallelError(f"model_class is for loading a path, and the model is a {type(model).__name__} already")
    if weights is None:
        if options:
            refuse_options(options, "the model is loaded already")
        return None
    return read_source(os.fspath(weights), options, of_its_own=False)


def _batching(
    batching: BatchingOptions | Mapping[str, int] | bool | Literal["auto"], kind: str, decode: Decode
) -> BatchingOptions | None:
    if batching is False:
        return None
    if batching == "auto":
        decodes = ("auto", "eager") if kind == "cpu" else ("auto", "cuda_graphs")
        return BatchingOptions() if decode in decodes else None
    options = read_options(BatchingOptions, None if batching is True else batching, "batching")
    if decode not in ("auto", "eager", "cuda_graphs"):
        raise ParallelError(f"decode is {decode!r}, a mode without batching; leave out decode= or batching=")
    return options


def _make_plan(
    model: Any,
    world_size: int,
    custom: CustomPolicies,
    dtype: torch.dtype | None,
    fitting: FitOptions,
    quantize: QuantizeOptions | None,
    budget: Budget | None,
    cpu_ranks: int,
) -> ShardPlan:
    """Return the plan; `cpu_ranks` counts CPU ranks of all replicas on this machine, 0 on CUDA or several hosts."""
    check_model(model)
    ahead = bytes_ahead(model) if cpu_ranks and threads_of_rank(cpu_ranks) == 1 else 0
    shard_plan = make_plan(model, world_size, custom, dtype, fitting, quantize, ahead)
    shard_plan.cache = kind_for(model, fitting.cache)
    shard_plan.tiers = tiers_for(model, shard_plan, budget)
    for warning in filter(None, (shard_plan.warning, shard_plan.why_uncut)):
        log.warning("%s", warning)
    return shard_plan
