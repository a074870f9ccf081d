"""Installs this library's versions of functions of torch and transformers, and of modules, in the process of a rank."""

from __future__ import annotations

import torch
from torch import nn

from parallelformers_ng.generation.cache_kinds import order_prefetches
from parallelformers_ng.generation.deferred_stops import defer_stops
from parallelformers_ng.generation.end_scores import forbid_ends_by_index
from parallelformers_ng.generation.in_place_cache import append_in_place
from parallelformers_ng.generation.proposals import propose_after_prompt
from parallelformers_ng.generation.single_indices import slice_single_indices
from parallelformers_ng.generation.step_masks import answer_for_steps
from parallelformers_ng.kernels import installation, on_devices, sdpa
from parallelformers_ng.kernels.decoder_stack import StackInC
from parallelformers_ng.runtime import records
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.stored import StoredInParts


def install(device: torch.device) -> None:
    """Patch torch and transformers for a kind of device. All models of this process use the patches. Idempotent."""
    propose_after_prompt()
    if records.are_detailed():
        records.log_calls(StackInC, "run", lambda _, *steps: f"{len(steps)} steps in C, with the sums of all layers")
    if device.type == "cpu":
        sdpa.install()
        append_in_place()
        forbid_ends_by_index()
    else:
        on_devices.install_attention()
        look_ups.guard_look_ups()
        answer_for_steps()
        slice_single_indices()
        defer_stops()
        order_prefetches()


def install_kernels(model: nn.Module, plan: ShardPlan, device: torch.device) -> None:
    """Patch modules of a rank's model to use kernels, before the model is sharded and has its weights."""
    kernels = installation if device.type == "cpu" else on_devices
    kernels.install(model, {layer.path for layer in plan.layers if layer.cls is StoredInParts})
