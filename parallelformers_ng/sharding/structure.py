"""Describes the structure of a model: its repeated blocks, and the layers that a forward pass calls."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from parallelformers_ng.sharding.cache_names import CACHES
from parallelformers_ng.sharding.tensors import dotted


@dataclass(frozen=True)
class Place:
    """The path of a module within its repeated block; corresponding modules of all repetitions have equal `Place`s."""

    # class name of the innermost repeated block or `PreTrainedModel` that contains the module; without either, the
    # class name of the model
    block: str
    path: str  # dotted path beneath the block; "" for the block itself


@dataclass(frozen=True)
class Layer:
    """A Linear, Conv1D or Embedding that was called, and whose weight the model's outputs depend on."""

    place: Place
    name: str  # dotted path in the model
    inputs: int  # number of inputs; for an Embedding, its rows
    outputs: int  # number of outputs; for an Embedding, its width
    is_embedding: bool = False  # whether the layer is an Embedding


def places(model: nn.Module) -> dict[str, Place]:
    """Return, for every module by dotted path, its path within the innermost repeated block or `PreTrainedModel`."""
    place_of: dict[str, Place] = {}

    def visit(module: nn.Module, name: str, block: str, start: str) -> None:
        path = name[len(start) :].removeprefix(".")
        place_of[name] = Place(block, path)
        repeats = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for key, child in module.named_children():
            inner = dotted(name, key)
            own = repeats and not type(child).__module__.startswith("torch.") and any(True for _ in child.children())
            if own or isinstance(child, PreTrainedModel):
                visit(child, inner, type(child).__name__, inner)
            else:
                visit(child, inner, block, start)

    visit(model, "", type(model).__name__, "")
    return place_of


def uses(model: nn.Module) -> Counter[int]:
    return Counter(id(p) for module in model.modules() for p in module._parameters.values())


@contextlib.contextmanager
def traced_calls(model: nn.Module) -> Iterator[dict[str, int]]:
    """Context that records, by hooks, the order in which the modules' first calls end: dotted name → position, from 0.

    A module comes after the submodules that it calls.
    """
    calls: dict[str, int] = {}

    def note(name: str, *_: object) -> None:
        calls.setdefault(name, len(calls))

    hooks = [module.register_forward_hook(partial(note, name)) for name, module in model.named_modules()]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def called_layers(model: nn.Module, calls: Iterable[str], live: set[str]) -> list[Layer]:
    """Return the called linear layers and embeddings whose weight's name is in `live`, in the order of `calls`."""
    where, modules = places(model), dict(model.named_modules())
    layers = []
    for name in calls:
        module = modules.get(name)
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)) and f"{name}.weight" in live:
            outputs = dim_of_outputs(module)
            widths = module.weight.shape[1 - outputs], module.weight.shape[outputs]
            layers.append(Layer(where[name], name, *widths, isinstance(module, nn.Embedding)))
    return layers


def dim_of_outputs(module: nn.Module) -> int:
    """Return the dimension of outputs in the weight of a linear layer, `Conv1D`, embedding or convolution."""
    return 1 if isinstance(module, (nn.Embedding, Conv1D)) else 0


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested dictionaries, lists and tuples, in order, except KV caches and states.

    Caches and states are left out because they differ between ranks.
    """
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for name, value in output.items():
            if not name.endswith(CACHES) and name not in ("state", "mems"):
                yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)
