"""Compares the outputs of a sharded quantized twin with the outputs of a whole twin with rounded weights."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.proof import twin_of
from parallelformers_ng.autopolicy.trials import comparable_probes, on_each_rank
from parallelformers_ng.autopolicy.twin import equal
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.policy import Selection

# Number of inputs that share a scale, for schemes with groups. A twin's layers are too narrow for usual groups.
_GROUP = 2

# Data type of the trial, and largest relative difference. A twin is in float64, which cannot be quantized.
_DTYPE, _TOLERANCE = torch.float32, 1e-4


def check_quantized(model: PreTrainedModel, selection: Selection, world_size: int, options: QuantizeOptions) -> str:
    """Check a model's quantized shards on a twin in float32: outputs may differ by 1e-4 of the largest value.

    A scheme with groups is tested with groups of 2 inputs, because a twin's layers are narrow.
    """
    twin = twin_of(model)
    options = replace(options, group=_GROUP if options.block else None)
    small = copy.deepcopy(twin.model).to(_DTYPE)
    plan = build_plan(small, world_size, selection, quantize=options)
    if not plan.quantized:
        return (
            f"no weight of a tiny twin is quantized to {options.scheme}:"
            f" {'; '.join(set(plan.misfits.values())) or 'the twin has no layer that can be quantized'}"
        )
    probes = comparable_probes(twin, plan)

    def outputs_of(share: Any) -> list[list[torch.Tensor]]:
        return [probe.run_in(share, _DTYPE) for probe in probes]

    whole: Any = copy.deepcopy(small)
    with torch.no_grad():
        for name, encoding in plan.quantized.items():
            weight = whole.get_parameter(name)
            weight.copy_(encoding.decode(*encoding.encode(weight), weight.dtype))
        expected = outputs_of(whole)

    for outputs in on_each_rank(small, plan, outputs_of):
        if not all(equal(got, want, _TOLERANCE) for got, want in zip(outputs, expected, strict=True)):
            return f"its outputs differ in {options.scheme}"
    return ""
