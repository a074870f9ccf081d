"""Divides a model into stages of consecutive layers, one for each device, for pipelines and `balanced_device_map`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from parallelformers_ng.errors import PlacementError
from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.tensors import all_tensors, dotted, owned_tensors

# Sizes of the tensors of a unit: key → bytes. If several units of a stage have a key, such as a tied weight, it counts
# once.
Sizes = Mapping[Hashable, float]


def units(model: nn.Module) -> list[str]:
    """Return the paths of the units of a model that may not be split between stages, in the model's order.

    Units are the items of module lists, modules of the classes in `_no_split_modules`, and single layers. In a module
    with submodules, each own parameter or buffer is a unit. Every tensor belongs to a unit; a tied tensor may belong to
    several units.
    """
    atomic = set(getattr(model, "_no_split_modules", None) or ())
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, is_repeated: bool) -> Iterator[str]:
        if id(module) in seen or not all_tensors(module):
            return
        seen.add(id(module))
        children = list(module.named_children())
        if not children or (path and (is_repeated or type(module).__name__ in atomic)):
            yield path
            return
        yield from (dotted(path, name) for name, _, _ in owned_tensors(module))
        for name, child in children:
            yield from visit(child, dotted(path, name), isinstance(module, nn.ModuleList))

    return list(visit(model, "", False))


def tensors_of(model: nn.Module, unit: str) -> dict[str, torch.Tensor]:
    path, _, name = unit.rpartition(".")
    own = {short: tensor for short, tensor, _ in owned_tensors(model.get_submodule(path))}
    if name in own:
        return {unit: own[name]}
    return {dotted(unit, short): tensor for short, tensor in all_tensors(model.get_submodule(unit)).items()}


def find_stages(parts: Sequence[Sizes], shares: Sequence[float], everywhere: float = 0) -> list[Range]:
    """Divide consecutive units among devices, so that the largest fullness (bytes divided by the device's share) is
    smallest. Among equally good divisions, the smallest sum of squared fullness decides.

    `parts` has the tensors' sizes of each unit. Every device also holds `everywhere` bytes, and gets at least one unit.
    """
    count, stages = len(parts), len(shares)
    if count < stages:
        raise PlacementError(f"{stages} stages need {stages} parts, but the model has only {count} indivisible parts")

    def filled(start: int) -> Iterator[float]:
        """Yield the bytes of a device that holds the unit `start`, then with the next unit added, and so on."""
        seen_tensors: set[Hashable] = set()
        total = everywhere
        for part in parts[start:]:
            total += sum(size for key, size in part.items() if key not in seen_tensors)
            seen_tensors |= part.keys()
            yield total

    sizes = [list(enumerate(filled(start), start + 1)) for start in range(count)]

    def cheapest(cost: Callable[[float, float], float], limit: float) -> list[dict[int, tuple[float, int]]]:
        """Divide the parts into stages by dynamic programming, from the last stage to the first.

        For each stage, return: first part of the stage → (least cost of this and later stages, first part of the next
        stage). `cost` takes the fullness of a stage (bytes ÷ share of its device) and the cost of later stages. No
        stage is fuller than `limit`.
        """
        best = [{count: (0.0, count)}]
        for share in reversed(shares):
            ends = {}
            for start in range(count):
                allowed = [(stop, size / share) for stop, size in sizes[start] if size / share <= limit]
                ways = [(cost(full, best[-1][stop][0]), stop) for stop, full in allowed if stop in best[-1]]
                if ways:
                    ends[start] = min(ways)
            best.append(ends)
        return best[1:]

    fullest = cheapest(max, math.inf)[-1][0][0]
    bounds = [0]
    for ends in reversed(cheapest(lambda full, later: later + full**2, fullest)):
        bounds.append(ends[bounds[-1]][1])
    return list(pairwise(bounds))
