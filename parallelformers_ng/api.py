"""The entry point: check the arguments, make the plan, start the group, hand the weights over."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.code_check import CodeCheck
from parallelformers_ng.autopolicy.planning import CustomPolicies, check_fit, make_plan
from parallelformers_ng.autopolicy.proof import prove_custom
from parallelformers_ng.checkpoint.given import Given, open_given
from parallelformers_ng.checkpoint.loading import Checkpoint, open_source, prepare_conversions
from parallelformers_ng.checkpoint.location import Source, base_of_adapter, read_source, refuse_options
from parallelformers_ng.checkpoint.progress import progress_bar
from parallelformers_ng.cuda_graphs.modes import Decode, static_steps
from parallelformers_ng.errors import (
    AlreadyParallelizedError,
    ParallelError,
    PlacementError,
    UnsupportedModelError,
)
from parallelformers_ng.generation.cache_kinds import check_kind, kind_for
from parallelformers_ng.live_code.stock import tensor_of_own_class
from parallelformers_ng.model.around import surround, with_peft_adapters, within
from parallelformers_ng.model.deployment import Deployment
from parallelformers_ng.model.groups import group_makers
from parallelformers_ng.model.live_code import LiveCode
from parallelformers_ng.model.parallelized import enter, forget_end, is_parallelized
from parallelformers_ng.model.replica import Replica
from parallelformers_ng.offload.assignment import tiers_for
from parallelformers_ng.offload.budgets import Budget, budget_of
from parallelformers_ng.options import (
    OF_A_MODEL,
    BatchingOptions,
    FitOptions,
    QuantizeOptions,
    WorkerOptions,
    check_switches,
    read_options,
    read_quantize,
)
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.placement import check_count
from parallelformers_ng.runtime.supervisor import RestartLimit
from parallelformers_ng.sharding.casting import target_dtype
from parallelformers_ng.sharding.inject import settle
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy_registry import check_custom, written_policies

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
    """Cut `model` over several devices, one worker process each, in place.

    Afterwards `model(...)` and `model.generate(...)` run on the workers, from any thread; `model.deparallelize()` (or
    `.cpu()`, `.cuda()`, `.to()`) ends it and brings the weights back.

    Args:
        model: a transformers model with its weights loaded, or peft's around one; or a directory or model id of the
            hub, whose weights each worker then reads its share of, also a directory with an adapter of peft's; or a
            model on `meta`, with `weights`.
        num_gpus: number of workers. None: all visible GPUs, or 2 CPU workers if there is none.
        fp16: cast floating-point weights to float16, as `from_pretrained(dtype=torch.float16)` would.
        weights: the directory or model id that has the weights of a model on `meta`.
        model_class: the class to load a path as; by default the one that its configuration names.
        dtype: cast to this type instead ("bfloat16", torch.bfloat16, …); must agree with `fp16`. "auto", as None: as
            `from_pretrained` chooses, or as the model is.
        custom_policies: a Policy class or a list of them; they come before the written ones.
        adapters: for a path: directories, or names on the hub, of peft's adapters by the names that they get in the
            model, as by `load_adapter`; the first is active.
        workers: place and patience of the workers: `WorkerOptions`, or a dict of the same words (`{"device":
            "cpu", "timeout": 60}`). Or a group from `start_group`, which serves one model at a time and goes on running
            when its parallelization ends; `num_gpus` is then the group's.
        fit: how the model is laid over devices that are small, or unlike each other: `FitOptions`, or a dict of the
            same words.
        quantize: hold weights in few bits, quantized on their way to the ranks: "int8", "int4", "fp8"; or
            `QuantizeOptions`, or a dict of the same words (`{"scheme": "int8", "skip": ["mlp.down_proj"]}`); or a
            weight-only config of torchao's. docs/quantization.md says what comes back.
        decode: mode of the decode steps of `generate`. "eager". "compile": `torch.compile` over a cache of a
            fixed size; a `CompileConfig` of transformers chooses its settings, and the first call waits for the
            compiler. "cuda_graphs": captured over such a cache; other steps run plainly, and a warning says why, once;
            never run on a GPU, unmeasured. "auto" is "eager" on CPU ranks. On CUDA devices it is "cuda_graphs" for
            calls with the same kind of answer either way, until a capture fails: a warning says why.
        batching: decode calls of `generate` from many threads together: True, `BatchingOptions`, or a dict of the same
            words (`{"rows": 8}`). A call that cannot share a batch (beams, several prompts, a cache of the caller's, a
            model that would give other tokens) runs alone, in its turn. One that samples without `seed=` draws a seed
            where it comes beside others. "auto", on CPU ranks: from when two calls first come at the same time; on
            CUDA ranks, as False: one after another. True there decodes plain steps of all rows, while a lone call's may
            be captured; never run on a GPU, unmeasured.
        seed: seeds the model's own random stream; by default sampling follows the caller's torch generator.
        prove: accept custom policies only if a tiny random copy of the model gives the same outputs cut by them and
            whole: seconds of one core, once for a policy, a configuration and a number of ranks. False: trust them.
        verbose: print the memory of every device, "simple" (a line each) or "detail" (a table each).
        progress: show a progress bar where standard error is a terminal, now and when weights are gathered.
        load_options: for a path: arguments of `from_pretrained` (`revision`, `token`, `cache_dir`, `local_files_only`,
            `subfolder`, `variant`, `trust_remote_code`, `attn_implementation`, `key_mapping`, …), and attributes of the
            configuration that are to differ (`num_labels=3`).

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
        ParallelError: another argument has a value that it does not take, or there is none of that name.
    """
    check_switches(fp16=fp16, prove=prove, progress=progress)
    if verbose not in (None, "simple", "detail"):
        raise ParallelError(f"verbose is {verbose!r}; it takes 'simple', 'detail' or None")
    options = WorkerOptions() if isinstance(workers, WorkerGroup) else read_options(WorkerOptions, workers, "workers")
    makers: list[functools.partial[WorkerGroup]] = []
    fitting = read_options(FitOptions, fit, "fit")
    if isinstance(workers, WorkerGroup):
        world_size, kind = workers.world_size, workers.device
        if num_gpus not in (None, world_size):
            raise PlacementError(f"num_gpus is {num_gpus}, but the group given has {world_size} workers")
        fitting = fitting.over(workers.hosts.counts if workers.hosts else [world_size])
    else:
        makers, fitting = group_makers(num_gpus, options, fitting)
        world_size, kind = makers[0].args
    as_asked = None if decode in ("auto", "eager") else decode
    check_fit(fitting, world_size, custom_policies=custom_policies, decode=as_asked)
    target = target_dtype(fp16, dtype)
    check_kind(fitting.cache, kind, decode)
    budget = budget_of(fitting, world_size, kind, options.device_ids, options.replicas)
    as_it_is = fitting.cache is not None or budget is not None
    steps, unlike_asked = static_steps("eager" if as_it_is else decode, kind, world_size)
    if unlike_asked:
        log.warning("generate runs without CUDA graphs: %s", unlike_asked)
    is_path = isinstance(model, (str, os.PathLike))
    directories = {name: os.fspath(directory) for name, directory in (adapters or {}).items()}
    if directories and not is_path:
        raise ParallelError(f"adapters is for loading a path; put them into the {type(model).__name__} with peft")
    if is_path and (base := base_of_adapter(model)) is not None:
        directories, model = {"default": os.fspath(model), **directories}, base
    model, around = within(model)
    bits = read_quantize(quantize)
    batch = _batching(batching, kind, decode)
    source = _source(model, weights, model_class, load_options)
    loaded: Any = model
    forget_end(loaded)
    replicas: list[Replica] = []
    original: Given | None = None
    try:
        if isinstance(workers, WorkerGroup):
            replicas.append(Replica(workers, None))
        for maker in makers:  # they import torch while this process plans
            group = maker(wait=False)
            replicas.append(Replica(group, maker))
        dequantize = bits is not None and bits.dequantize
        if source is not None:
            loaded = open_source(source, model, target, dequantize)
        elif (plain := open_given(loaded, target, dequantize)) is not None:
            original = Given(loaded, plain)
        if directories:
            loaded, around = within(with_peft_adapters(loaded, directories))
        sharding = _make_plan(loaded, world_size, custom_policies, target, fitting, bits, budget)
        if prove and custom_policies is not None:
            prove_custom(loaded, check_custom(custom_policies), world_size, fitting.parts(world_size))
        deployment = Deployment(
            loaded,
            sharding,
            replicas,
            keep_weights=kind == "cpu" or options.host_copy,
            restart=options.restart,
            limit=RestartLimit(options.max_restarts, options.restart_window),
            checkpoint=None if source is None else Checkpoint.take(loaded, sharding),
            show_progress=progress,
            original=original,
            code=LiveCode(loaded, CodeCheck(loaded, sharding, sharding.selection)),
        )
        what = "cutting" if source is None else "loading"
        with progress_bar(f"{what} {type(loaded).__name__}", sharding.bytes_whole, progress) as advance:
            deployment.start(loaded, advance)
    except BaseException:
        for replica in replicas:
            replica.leave()
        if original is not None:
            original.restore()
        raise
    settle(loaded, sharding)
    if getattr(loaded, "is_quantized", False):  # a mark alone, which would keep it from being saved
        loaded.hf_quantizer.remove_quantization_config(loaded)
    if sharding.strategy != "tensor":
        steps = None
    enter(loaded, deployment, seed, steps, batch, prove_at_once=batching != "auto")
    surround(around, loaded)
    if verbose is not None:
        print(loaded.memory_summary(detail=verbose == "detail"))
    return around[0] if around else loaded


def start_group(num_gpus: int | None = None, **options: Any) -> WorkerGroup:
    """Start workers that serve one model after another, so that only the first pays for their start.

    `with start_group(2) as group: parallelize(model, workers=group)`.

    Args:
        num_gpus: same as in `parallelize`.
        options: `device`, `device_ids`, `backend`, `timeout` and `start_timeout` of `WorkerOptions`. The others belong
            to a model, whose weights a new group would need; a group given to `parallelize` is not restarted.

    Raises:
        PlacementError: there are not as many devices as asked for.
        StartupError: a worker could not start.
        ParallelError: an option has a value that it does not take, or there is none of that name.
    """
    for name in OF_A_MODEL:
        if name in options:
            raise ParallelError(
                f"start_group takes no {name}: it starts one group, which serves one model after another and is not"
                " restarted"
            )
    (make,), _ = group_makers(num_gpus, read_options(WorkerOptions, options, "start_group"), FitOptions())
    group = make(wait=False)
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
    fit: FitOptions | Mapping[str, Any] | None = None,
    quantize: Any = None,
) -> ShardPlan:
    """Return how `parallelize` would cut `model`, without starting anything. A model on `meta` will do.

    Args:
        model: a transformers model.
        num_gpus: number of ranks.
        fp16: same as in `parallelize`; decides the bytes.
        dtype: same as in `parallelize`; decides the bytes.
        custom_policies: same as in `parallelize`.
        fit: same as in `parallelize`.
        quantize: same as in `parallelize`; decides the bytes.

    Returns:
        The plan: `bytes_per_rank`, `replicated`, `policy`, `source`; `print` shows it as a table.

    Raises:
        UnsupportedModelError: not a transformers model, or no policy fits it.
        PolicyError: a policy does not fit the model.
    """
    check_count(num_gpus)
    check_switches(fp16=fp16)
    fitting, bits = read_options(FitOptions, fit, "fit"), read_quantize(quantize)
    check_fit(fitting, num_gpus, custom_policies=custom_policies)
    budget = budget_of(fitting, num_gpus, "cuda" if torch.cuda.is_available() else "cpu")
    model, _ = within(model)
    check_model(model)
    target = target_dtype(fp16, dtype)
    plain = open_given(model, target, bits is not None and bits.dequantize) or model
    return _make_plan(plain, num_gpus, custom_policies, target, fitting, bits, budget)


def _source(
    model: Any,
    weights: str | os.PathLike[str] | None,
    model_class: type[PreTrainedModel] | None,
    options: Mapping[str, Any],
) -> Source | None:
    """Return the checkpoint that the weights come from, None if the model has them; every argument for it acts or
    is refused."""
    if isinstance(model, (str, os.PathLike)):
        if weights is not None:
            raise ParallelError("weights is for a model on meta; a path has its own")
        return read_source(os.fspath(model), options, model_class)
    check_model(model)
    if model_class is not None:
        raise ParallelError(f"model_class is for loading a path, and the model given is a {type(model).__name__}")
    if weights is None:
        if options:
            refuse_options(options, "the model given is loaded already")
        return None
    return read_source(os.fspath(weights), options, of_its_own=False)


def _batching(
    batching: BatchingOptions | Mapping[str, int] | bool | Literal["auto"], kind: str, decode: Decode
) -> BatchingOptions | None:
    if batching is False:
        return None
    if batching == "auto":
        return BatchingOptions() if kind == "cpu" and decode in ("auto", "eager") else None
    options = read_options(BatchingOptions, None if batching is True else batching, "batching")
    if decode not in ("auto", "eager", "cuda_graphs"):
        raise ParallelError(f"the steps of a batch are not compiled, and decode is {decode!r}; leave one of them out")
    return options


def check_model(model: nn.Module) -> None:
    """Refuse what cannot be parallelized, whatever the policies."""
    if is_parallelized(model):
        raise AlreadyParallelizedError(f"{type(model).__name__} is parallelized already; call deparallelize() first")
    refuse_compiled(model)
    if not isinstance(model, PreTrainedModel):
        cls = type(model)
        hint = "; pass what its merge_and_unload() returns" if hasattr(model, "merge_and_unload") else ""
        raise UnsupportedModelError(
            f"parallelize takes a transformers PreTrainedModel, not {cls.__module__}.{cls.__name__}{hint}"
        )
    name, kind = tensor_of_own_class(model)
    if name:
        raise UnsupportedModelError(
            f"{name} is a {kind}, whose code says what functions of torch do with it, and the ranks hold plain tensors;"
            " pass the model with plain parameters"
        )
    if getattr(model, "hf_device_map", None) and len(set(model.hf_device_map.values())) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread by device_map={model.hf_device_map}; load it without device_map"
        )


def refuse_compiled(model: nn.Module) -> None:
    """Raise UnsupportedModelError if `torch.compile` has taken the place of the model or of a forward in it."""
    for path, module in model.named_modules():
        compiled = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        if compiled or "_orig_mod" in module._modules:
            raise UnsupportedModelError(
                f"{path or type(model).__name__} is compiled by torch.compile, and the workers have other code to"
                " compile: their shards. Pass the model as it was before torch.compile, and decode='compile' if the"
                " decode steps should be compiled"
            )


def _make_plan(
    model: Any,
    world_size: int,
    custom: CustomPolicies,
    dtype: torch.dtype | None,
    fitting: FitOptions,
    quantize: QuantizeOptions | None,
    budget: Budget | None,
) -> ShardPlan:
    check_model(model)
    shard_plan = make_plan(model, world_size, custom, dtype, fitting, quantize)
    shard_plan.cache = kind_for(model, fitting.cache)
    shard_plan.tiers = tiers_for(model, shard_plan, budget)
    for warning in filter(None, (shard_plan.warning, shard_plan.why_uncut)):
        log.warning("%s", warning)
    return shard_plan
