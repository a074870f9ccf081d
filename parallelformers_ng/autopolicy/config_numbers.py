"""The meaning of the numbers in a configuration, read from a model built on `meta`."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

LONG = 256
"""Tables with more rows are shortened to about as many."""
_BEFORE = 2
"""How many rows a table may have before the first of those that the configuration counts, for padding and the like."""


@dataclass(frozen=True)
class Shapes:
    """The meaning of the numbers in a configuration, seen on the model.

    Attributes:
        lengths: lengths of the lists of modules: a setting that counts layers equals one of these. Any, if
            there is no model.
        sizes: all sizes of parameters. A list of nothing but these lists sizes, and no numbers of layers.
        tables: numbers that count the rows of a long table: positions and the like.
        windows: whether sizes of parameters follow the windows, which are no windows of tokens then.
    """

    lengths: Container[int] = range(1000)
    sizes: frozenset[int] = frozenset()
    tables: frozenset[int] = frozenset()
    windows: bool = False

    def numbers_layers(self, numbers: Sequence[Any], count: int) -> bool:
        """Return whether a list names some of `count` layers: in order, each once, into the last quarter of them,
        perhaps with the states after the last. Scales of pooling and the like end before."""
        if not numbers or any(type(number) is not int for number in numbers) or self.sizes.issuperset(numbers):
            return False
        return list(numbers) == sorted(set(numbers)) and numbers[0] >= 0 and 3 * count <= 4 * numbers[-1] <= 4 * count


UNSEEN = Shapes()


def shapes_of(model: nn.Module) -> Shapes:
    """Read a model of full size; sets all but `tables` and `windows`, which are seen on small copies."""
    lengths = {len(module) for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))}
    return Shapes(lengths, frozenset(size for parameter in model.parameters() for size in parameter.shape))


def long_tables(model: nn.Module) -> frozenset[int]:
    """Return `Shapes.tables`, seen in a copy with small widths and vocabularies."""
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    return frozenset(count - before for count in rows for before in range(_BEFORE + 1) if count - before > LONG)
