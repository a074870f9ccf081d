"""Swaps the parallel layers in, as the plan says. Runs on a rank, on a skeleton whose tensors are still on `meta`."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.sharding.layers import parallel_class
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.tensors import get_tensor, set_tensor

_COPY_OF = "_parallelformers_ng_copy_of"


def inject(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> None:
    """Turn `model` into rank `rank`'s share of it: parallel layers, local attributes, no weights yet.

    A column-parallel layer needs no class of its own: it is the same layer with fewer outputs.
    """
    settle(model, plan)
    for layer in plan.layers:
        module: Any = model.get_submodule(layer.path)
        if layer.cls is not None:
            module.__class__ = parallel_class(layer.cls, type(module))  # type: ignore[arg-type]
            module.communicator = communicator
        for name, value in layer.attributes[rank].items():
            set_attribute(module, name, value)


def settle(model: nn.Module, plan: ShardPlan) -> None:
    """Set what a cast changes of a model besides its tensors."""
    for name, value in plan.settings.items():
        owner, _, last = name.rpartition(".")
        setattr(attrgetter(owner)(model) if owner else model, last, value)


def set_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Set the dotted `name` beneath a module. A configuration on the way is copied first: others still read the
    whole."""
    owner: Any = module
    *path, last = name.split(".")
    for part in path:
        if part == "config":
            whole = getattr(owner, part)
            setattr(owner, part, copy.copy(whole))
            vars(getattr(owner, part)).setdefault(_COPY_OF, whole)
        owner = getattr(owner, part)
    setattr(owner, last, value)


def set_config(model: nn.Module, name: str, value: Any) -> None:
    """Change `name`, dotted from the model on, of a configuration, also in the copies that `set_attribute` made of it.

    A copy whose value differs was given a value of its own, which stays.
    """
    owner, _, last = name.rpartition(".")
    held = attrgetter(owner)(model)
    whole = getattr(held, _COPY_OF, held)
    before = getattr(whole, last, None)
    for config in (whole, *(module.__dict__.get("config") for module in model.modules())):
        if (config is whole or getattr(config, _COPY_OF, None) is whole) and getattr(config, last, None) == before:
            setattr(config, last, value)


def cut(model: nn.Module, plan: ShardPlan, rank: int, communicator: Communicator) -> nn.Module:
    """A copy of `model` that is rank `rank`'s share of it, weights included. The model itself is left as it is.

    For proofs and tests in one process; workers build theirs from a skeleton instead.
    """
    names = {id(t): t for t in (*model.parameters(), *model.buffers())}
    share = copy.deepcopy(model, dict(names))  # the copy shares the tensors, so nothing is held twice
    inject(share, plan, rank, communicator)
    held: dict[str, torch.Tensor] = {}
    for name, tensor_plan in plan.tensors.items():
        if tensor_plan.storage not in held:
            whole = get_tensor(model, name, tensor_plan.is_buffer)
            part = tensor_plan.shards[rank].of(whole.detach()).to(tensor_plan.dtype, copy=True)
            held[tensor_plan.storage] = part.contiguous()
        set_tensor(share, name, held[tensor_plan.storage], tensor_plan.is_buffer)
    return share
