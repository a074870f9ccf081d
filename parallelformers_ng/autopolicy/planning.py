"""Model, number of ranks, options → plan, by the strategy that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.pipeline_proof import UNCUT, may_merge
from parallelformers_ng.autopolicy.select import select
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.options import FitOptions, QuantizeOptions
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.pipeline import in_stages
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.rules import Policy

CustomPolicies = type[Policy] | Sequence[type[Policy]] | None


def check_fit(fit: FitOptions, world_size: int, **others: Any) -> None:
    """Refuse what cannot be done together.

    Args:
        others: further arguments of `parallelize`, by name; None for those not given.

    Raises:
        ParallelError: which two, in words.
    """
    fit.parts(world_size)
    if fit.strategy != "tensor":
        for name, value in {**others, "cache": fit.cache}.items():
            if value is not None:
                raise ParallelError(f"{name} is for strategy='tensor' so far, and fit's strategy is {fit.strategy!r}")


def make_plan(
    model: PreTrainedModel,
    world_size: int,
    custom: CustomPolicies,
    dtype: torch.dtype | None,
    fit: FitOptions,
    quantize: QuantizeOptions | None = None,
) -> ShardPlan:
    """How so many ranks hold a model.

    Args:
        custom: the caller's policies.
        dtype: data type to cast floating-point parameters to; None leaves them.
        quantize: which weights are held in few bits.

    Raises:
        UnsupportedModelError: no policy fits, or the model cannot be computed in stages.
        PolicyError: a policy does not fit the model.
        PlacementError: the model has fewer parts than there are stages.
    """
    parts = fit.parts(world_size)
    if fit.strategy == "pipeline":
        uncut = build_plan(model, 1, UNCUT, dtype)
        return in_stages(uncut, model, parts or [1 / world_size] * world_size, merged=may_merge(model))
    selection = select(model, custom, world_size, parts)
    return build_plan(model, world_size, selection, dtype, parts=parts, quantize=quantize)
