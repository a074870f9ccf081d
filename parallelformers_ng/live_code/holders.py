"""Reads the dictionaries in which Python looks up a model's code: of classes, module globals and registries."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.generic import GeneralInterface

from parallelformers_ng.live_code.object_graph import is_same

_MISSING = object()


def table_of(holder: Any, key: str) -> dict[str, Any]:
    """The dictionary that has the name `key`: of a class (without its bases), of module globals or of a registry."""
    if isinstance(holder, type):
        table: dict[str, Any] = gc.get_referents(vars(holder))[0]  # a mapping proxy is slower to read
        return table
    if isinstance(holder, GeneralInterface):
        return holder._local_mapping if key in holder._local_mapping else type(holder)._global_mapping
    return holder


def value_in(holder: Any, key: str, default: Any = None) -> Any:
    return dict.get(table_of(holder, key), key, default)


def entries_of(registry: Any) -> list[tuple[Any, Any]]:
    """The (key, value) entries of a registry or a dictionary, without calling overridden methods.

    A registry is a `GeneralInterface` of transformers, with entries of its object and of its class. If both have a key,
    the object's entry counts.
    """
    if isinstance(registry, GeneralInterface):
        return [*{**type(registry)._global_mapping, **registry._local_mapping}.items()]
    return [*dict.items(registry)]


@dataclass
class NamedValues:
    """Watches the values in the dictionary of a class, of module globals or of a registry for replacement.

    Attributes:
        items: the names and their present values.
        owner: the class that has the names.
        values: the watched names and their first values.
        size: number of names, if an added name counts as a change; otherwise -1.
    """

    items: dict[str, Any]
    owner: type | None
    values: dict[str, Any] = field(default_factory=dict)
    size: int = -1

    def hold(self, values: dict[str, Any]) -> None:
        self.values |= values
        self.size = len(self.items)

    def holds(self) -> bool:
        same = all(is_same(self.items.get(key, _MISSING), value) for key, value in self.values.items())
        return same and self.size in (-1, len(self.items))


class Tables(dict[int, NamedValues]):
    """Names and values of several holders: id of a dictionary → its names."""

    def of(self, holder: Any, key: str = "") -> NamedValues:
        items = table_of(holder, key)
        if id(items) not in self:
            self[id(items)] = NamedValues(items, holder if isinstance(holder, type) else None)
        return self[id(items)]
