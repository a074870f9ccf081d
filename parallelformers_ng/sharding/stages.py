"""Divides a model into stages: runs of indivisible parts, one run for each device. `balanced_device_map` and the
pipeline use this module."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from parallelformers_ng.errors import PlacementError
from parallelformers_ng.sharding.partition import Range
from parallelformers_ng.sharding.tensors import all_tensors, dotted, owned_tensors

Sizes = Mapping[Hashable, float]
"""Sizes of a part's tensors: key → bytes. A key in several parts of one stage, such as a tied weight, counts once."""

_CLOSE = 1e-9


def units(model: nn.Module) -> list[str]:
    """Return the paths of a model's indivisible units, in the model's order.

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
    """Return the parameters and buffers of a unit from `units`, by their names in the model.

    Raises:
        AttributeError: the model has no such unit.
    """
    path, _, name = unit.rpartition(".")
    own = {short: tensor for short, tensor, _ in owned_tensors(model.get_submodule(path))}
    if name in own:
        return {unit: own[name]}
    return {dotted(unit, short): tensor for short, tensor in all_tensors(model.get_submodule(unit)).items()}


def find_stages(parts: Sequence[Sizes], shares: Sequence[float], everywhere: float = 0) -> list[Range]:
    """Cut consecutive parts into runs, one for each device, so that the fullest device is as little full as possible.

    A device's fullness is its bytes divided by its share. Among equally good cuts, the cut with the least sum of
    squared fullness is chosen. The largest fullness is at most a billionth above the least possible one.

    Args:
        parts: sizes of each part, in the model's order.
        shares: fraction of the model for each device, sum 1.
        everywhere: bytes that every device holds besides its parts.

    Returns:
        The range of parts of each device, at least one part.

    Raises:
        PlacementError: there are fewer parts than devices.

    >>> find_stages([{0: 3}, {1: 1}, {2: 1}, {3: 1}], [0.5, 0.5])
    [(0, 1), (1, 4)]
    >>> find_stages([{each: 1} for each in range(8)], [0.25, 0.75])
    [(0, 2), (2, 8)]
    """
    count, stages = len(parts), len(shares)
    if count < stages:
        raise PlacementError(f"{stages} stages need {stages} parts, but the model has only {count} indivisible parts")

    def runs(start: int, most: float, share: float) -> Iterator[tuple[int, float]]:
        """Yield each possible end of a stage that begins at `start`, and the stage's bytes divided by its share."""
        seen_tensors: set[Hashable] = set()
        size = everywhere
        for stop in range(start, count):
            size += sum(size for key, size in parts[stop].items() if key not in seen_tensors)
            seen_tensors |= parts[stop].keys()
            if size / share > most:
                return
            yield stop + 1, size / share

    def fits(most: float) -> bool:
        start = 0
        for stage, share in enumerate(shares):
            reach = max((stop for stop, _ in runs(start, most, share)), default=start)
            stop = min(reach, count - (stages - stage - 1))  # each later stage also needs a part
            if stop <= start:
                return False
            start = stop
        return start == count

    low, high = 0.0, (everywhere + sum(size for part in parts for size in part.values())) / min(shares)
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)

    # Among all cuts within that limit, choose the least sum of squares, from the last stage to the first.
    best: list[dict[int, tuple[float, int]]] = [{count: (0.0, count)}]
    for share in reversed(shares):
        later, ends = best[-1], dict[int, tuple[float, int]]()
        for start in range(count):
            ways = [(later[stop][0] + full**2, stop) for stop, full in runs(start, high, share) if stop in later]
            if ways:
                ends[start] = min(ways)
        best.append(ends)
    bounds = [0]
    for ends in reversed(best[1:]):
        bounds.append(ends[bounds[-1]][1])
    return list(pairwise(bounds))
