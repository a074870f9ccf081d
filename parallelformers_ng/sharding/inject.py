"""Turns the modules of a model into the parallel layers of a plan, on a rank, before the weights are loaded."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.sharding.attributes import set_attribute
from parallelformers_ng.sharding.layers import parallel_class
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.quantized import quantize_modules
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor


def inject(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> None:
    """Turn the modules of `model` into rank `rank`'s parallel layers, and set their attributes. Weights do not change.

    A column-parallel layer keeps its class: it is the same layer with fewer outputs.
    """
    settle(model, plan)
    for layer in plan.layers:
        module: Any = model.get_submodule(layer.path)
        if layer.cls is not None:
            module.__class__ = parallel_class(layer.cls, type(module))  # type: ignore[arg-type]
            layer.cls.connect(module, communicator, plan.stage_width)
        for name, value in layer.attributes[rank].items():
            set_attribute(module, name, value)


def settle(model: nn.Module, plan: ShardPlan) -> None:
    """Set attributes that hold a data type, such as `config.dtype`, to the data type after the plan's cast."""
    for name, value in plan.settings.items():
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(model) if owner else model, last, value)


def cut(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> nn.Module:
    """Return a copy of `model` with the parallel layers and the weight shards of rank `rank`.

    For proofs and tests in one process; workers build their modules from a skeleton instead. The weights have the data
    types of the plan, and stay on their devices.
    """
    names = {id(t): t for t in (*model.parameters(), *model.buffers())}
    share = copy.deepcopy(model, dict(names))  # the memo makes the copy share all tensors, so they need no memory twice
    quantize_modules(share, plan)
    inject(share, plan, rank, communicator)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor_plan in plan.tensors.items():
        parts = plan.parts(name)
        if parts[0].storage not in tensors:
            whole = get_tensor(model, name, tensor_plan.is_buffer).detach().to(tensor_plan.dtype)
            encoding = plan.quantized.get(name)
            for part, values in zip(parts, (whole,) if encoding is None else encoding.encode(whole), strict=True):
                tensors[part.storage] = part.shards[rank].of(values).clone().contiguous()
        for part in parts:
            set_tensor(share, part.name, tensors[part.storage], part.is_buffer)
    return share
