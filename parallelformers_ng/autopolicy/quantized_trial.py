"""Compares a twin on ranks that hold its weights in few bits with the whole one, its weights rounded as these are."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.autopolicy.proof import twin_of
from parallelformers_ng.autopolicy.trials import comparable_probes
from parallelformers_ng.autopolicy.twin import equal, run
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.threads import run_ranks
from parallelformers_ng.options import QuantizeOptions
from parallelformers_ng.sharding.builder import build_plan
from parallelformers_ng.sharding.inject import cut
from parallelformers_ng.sharding.policy import Selection

_GROUP = 2
"""Inputs that share a scale where groups do: a twin's layers are too narrow for those of a model."""

_DTYPE, _TOLERANCE = torch.float32, 1e-4
"""A twin computes in float64, from which nothing is quantized."""


def check_quantized(model: PreTrainedModel, selection: Selection, world_size: int, options: QuantizeOptions) -> str:
    """ "" if the outputs match, else what differs.

    Args:
        model: whose twin it is; only its class and configuration are read.
        selection: the policies.
        options: with a scheme.

    Raises:
        UnsupportedModelError: no twin could be made.
    """
    twin = twin_of(model)
    options = replace(options, group=_GROUP if options.block else None)
    small = copy.deepcopy(twin.model).to(_DTYPE)
    plan = build_plan(small, world_size, selection, quantize=options)
    if not plan.quantized:
        return (
            f"nothing of a twin is {options.scheme}: {'; '.join(set(plan.misfits.values())) or 'it has no such layers'}"
        )
    probes = comparable_probes(twin, plan)
    whole: Any = copy.deepcopy(small)
    with torch.no_grad():
        for name, encoding in plan.quantized.items():
            weight = whole.get_parameter(name)
            weight.copy_(encoding.decode(*encoding.encode(weight), weight.dtype))
        wanted = [run(whole.get_submodule(probe.path), probe.inputs, _DTYPE) for probe in probes]

    def on_rank(communicator: Communicator) -> list[list[torch.Tensor]]:
        share = cut(small, plan, communicator.rank, communicator)
        with torch.no_grad():
            return [run(share.get_submodule(probe.path), probe.inputs, _DTYPE) for probe in probes]

    for reason in run_ranks(world_size, on_rank):
        if not all(equal(got, want, _TOLERANCE) for got, want in zip(reason, wanted, strict=True)):
            return f"its outputs differ in {options.scheme}"
    return ""
