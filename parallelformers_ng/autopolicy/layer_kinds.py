"""Finds the kinds of layers that a model repeats, and the kinds that a small copy lacks."""

from __future__ import annotations

import re

from torch import nn

# Kind of a repeated module, independent of sizes: its class name, and the names of its parameters.
Kind = tuple[str, frozenset[str]]


def first_of_each_kind(model: nn.Module) -> dict[Kind, int]:
    """Return each kind of module in the model's `ModuleList` and `Sequential` objects, with its lowest index in a list.

    Modules without parameters or without submodules are left out.
    """
    first: dict[Kind, int] = {}
    for container in model.modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for index, child in enumerate(container.children()):
            names = (re.sub(r"\d+", "*", name) for name, _ in child.named_parameters())
            kind = type(child).__name__, frozenset(names)
            if kind[1] and any(True for _ in child.children()):
                first[kind] = min(index, first.get(kind, index))
    return first


def absent_kinds(model: nn.Module, small: nn.Module) -> dict[Kind, int]:
    small_kinds = first_of_each_kind(small)
    return {kind: index for kind, index in first_of_each_kind(model).items() if kind not in small_kinds}
