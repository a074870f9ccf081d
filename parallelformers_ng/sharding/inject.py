"""Turns modules into the parallel layers of a plan. Runs on a rank, on a skeleton whose tensors are on `meta`."""

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
    """Reduce `model` to the modules of rank `rank`: set parallel layers and local attributes, but no weights.

    A column-parallel layer needs no class of its own: it is the same layer with fewer outputs.
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
    """Set the attributes of a model that the plan's cast changes, such as data types in the configuration."""
    for name, value in plan.settings.items():
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(model) if owner else model, last, value)


def cut(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> nn.Module:
    """Return a copy of `model`, reduced to the modules and weights of rank `rank`. `model` itself is not changed.

    For proofs and tests in one process. Workers build their modules from a skeleton instead. The weights have the data
    types of the plan, and stay on their devices. Arguments and errors are those of `inject`.
    """
    names = {id(t): t for t in (*model.parameters(), *model.buffers())}
    share = copy.deepcopy(model, dict(names))  # the copy shares the tensors and needs no memory for them
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
