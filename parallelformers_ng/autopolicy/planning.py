"""Makes the plan of a model for a number of ranks, by the strategy of `FitOptions`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.proof import UNCUT, may_merge
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.errors import ParallelError, PlacementError, UnsupportedModelError
from parallelformers_ng.options import FitOptions, QuantizeOptions
from parallelformers_ng.sharding.adapters import with_adapters, without_adapters
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy import CustomPolicies
from parallelformers_ng.sharding.wording import human_bytes

# In a pipeline, only one rank computes at a time. So strategy "auto" chooses a pipeline only if the pipeline's fullest
# rank holds less than 80 % of the bytes of the fullest rank with tensor parallelism.
_MAX_PIPELINE_BYTES = 0.8


def check_fit(fit: FitOptions, world_size: int, **others: Any) -> None:
    """Raise an error if two arguments of `parallelize` exclude each other."""
    fit.parts(world_size)
    if fit.has_stages:
        for name, value in others.items():
            if value is not None:
                raise ParallelError(f"{name} is for strategy='tensor' so far, but fit's strategy is {fit.strategy!r}")


def make_plan(
    model: PreTrainedModel,
    world_size: int,
    custom: CustomPolicies,
    dtype: torch.dtype | None,
    fit: FitOptions,
    quantize: QuantizeOptions | None = None,
    ahead: int = 0,
) -> ShardPlan:
    parts = fit.parts(world_size)
    plain: Any = without_adapters(model)

    def adapted(shard_plan: ShardPlan) -> ShardPlan:
        dequantize = quantize is not None and quantize.dequantize
        return shard_plan if plain is model else with_adapters(shard_plan, plain, model, dtype, dequantize)

    def cut() -> ShardPlan:
        selection = select(plain, custom, world_size, parts)
        return adapted(build_plan(plain, world_size, selection, dtype, parts=parts, quantize=quantize, ahead=ahead))

    def staged() -> ShardPlan:
        width, stages = fit.tensor or 1, world_size // (fit.tensor or 1)
        selection = select(plain, custom, width) if width > 1 else UNCUT
        stage = adapted(build_plan(plain, width, selection, dtype, quantize=quantize))
        return in_stages(stage, model, parts or [1 / stages] * stages, may_merge(plain), plain)

    if fit.strategy == "auto" and world_size > 1 and custom is quantize is fit.cache is None:
        return better(cut, staged)
    return staged() if fit.has_stages else cut()


def better(cut: Callable[[], ShardPlan], staged: Callable[[], ShardPlan]) -> ShardPlan:
    """Choose between tensor parallelism and a pipeline for strategy "auto", and set the plan's `why`.

    `cut` makes the plan for tensor parallelism, `staged` the plan for a pipeline. The pipeline is chosen if `cut`
    raises UnsupportedModelError, or if two conditions hold: tensor parallelism replicates more than 10 % of the bytes,
    and the pipeline's fullest rank holds less than 80 % of the bytes of the fullest rank with tensor parallelism.
    """
    try:
        tensor = cut()
    except UnsupportedModelError as error:
        return replace(staged(), why=f"because the layers cannot be sharded: {error}")
    if not tensor.warning:
        return replace(
            tensor,
            why=f"because {1 - tensor.whole_share:.0%} of the bytes can be sharded, and all ranks compute at once",
        )
    try:
        pipeline = staged()
    except (UnsupportedModelError, PlacementError) as error:
        return replace(tensor, why=f"because the model cannot be divided into stages: {error}")
    full, fuller = human_bytes(max(pipeline.bytes_per_rank)), human_bytes(max(tensor.bytes_per_rank))
    if max(pipeline.bytes_per_rank) < _MAX_PIPELINE_BYTES * max(tensor.bytes_per_rank):
        return replace(pipeline, why=f"because its fullest rank has {full}, with strategy 'tensor' {fuller}")
    return replace(tensor, why=f"because its fullest rank has {fuller}, with strategy 'pipeline' {full}")
