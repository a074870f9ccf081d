"""Reads from a model on `meta` what the numbers in its configuration mean, and the kinds of layers that it repeats."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

LONG = 256  # number of rows to which longer embedding tables are shortened, approximately
_BEFORE = 2  # a table has at most 2 rows more than its setting says, for example for padding


@dataclass(frozen=True)
class Shapes:
    """The sizes of a model, which tell the meaning of the numbers in its configuration."""

    # Lengths of the model's module lists. A setting that counts layers equals one of them. Without a model: 0 to 999.
    lengths: Container[int] = range(1000)
    # All dimensions of the parameters. A list in the configuration with only such sizes is no list of layer numbers.
    sizes: frozenset[int] = frozenset()
    # Values in the configuration that equal the number of rows of a long embedding table, for example of positions.
    tables: frozenset[int] = frozenset()
    windows: bool = False  # whether parameter shapes depend on the window settings, which must then stay

    def numbers_layers(self, numbers: Sequence[Any], count: int) -> bool:
        """Return whether a list in a configuration consists of layer numbers, from 0 to `count`.

        Such a list is sorted, has no number twice, and ends in the last quarter of the layers. Number `count` stands
        for the states after the last layer. Lists of other numbers, such as pooling scales, usually end earlier.
        """
        if not numbers or any(type(number) is not int for number in numbers) or self.sizes.issuperset(numbers):
            return False
        return list(numbers) == sorted(set(numbers)) and numbers[0] >= 0 and 3 * count <= 4 * numbers[-1] <= 4 * count


UNSEEN = Shapes()


def shapes_of(model: nn.Module) -> Shapes:
    """Return the lengths and sizes of a model of full size; `tables` and `windows` are read from small copies later."""
    lengths = {len(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))}
    return Shapes(lengths, frozenset(size for parameter in model.parameters() for size in parameter.shape))


def long_tables(model: nn.Module) -> frozenset[int]:
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(count - before for count in rows for before in range(_BEFORE + 1) if count - before > LONG)


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
