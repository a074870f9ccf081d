"""Detects changes inside the objects that the user's code reads: dictionaries, lists, tensors and own objects."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from parallelformers_ng.live_code.functions import function_behind
from parallelformers_ng.live_code.object_graph import (
    attributes_of,
    children_of,
    has_same,
    items_of,
    own_attributes,
    snapshot,
    values_in,
    walk,
)

_MAX_ITEMS = 100_000


class State:
    """Snapshot of everything mutable in a value, to detect changes in place.

    Random generators are ignored, because calls advance the copies on the ranks.

    Attributes:
        is_too_large: whether the value has more than 100,000 parts, so that not all are followed.
    """

    def __init__(self, value: Any) -> None:
        self._parts: list[tuple[Any, type, Callable[[Any], Any], Any]] = []
        count = 0
        for part in walk([value], children_of):
            if count >= _MAX_ITEMS:
                break
            items = None if isinstance(part, nn.Parameter) else items_of(part)
            attributes = attributes_of(part)
            # `vars` is faster.
            read_attributes = vars if attributes is getattr(part, "__dict__", None) else own_attributes
            for read, content in ((items_of, items), (read_attributes, attributes)):
                if content is not None:
                    self._parts.append((part, type(part), read, snapshot(content)))
                    count += len(content)
        self.is_too_large = count >= _MAX_ITEMS

    def __bool__(self) -> bool:
        return bool(self._parts)

    def holds(self) -> bool:
        """Whether no object has changed since the snapshot."""
        return all(type(part) is cls and has_same(read(part), before) for part, cls, read, before in self._parts)

    def has_other_code(self) -> bool:
        """Whether a function, a class or a module was put into, or taken out of, an object, or an object's class was
        exchanged."""
        for part, cls, read, before in self._parts:
            if type(part) is not cls:
                return True
            if not has_same(now := read(part), before):
                contents = before, snapshot(now)
                first, second = ({id(value): value for value in values_in(content)} for content in contents)
                if any(is_code({**first, **second}[each]) for each in first.keys() ^ second.keys()):
                    return True
        return False


def is_code(value: Any) -> bool:
    """Whether a value is code: a function, a method, a property, a class or a module."""
    return callable(value) or isinstance(value, types.ModuleType) or function_behind(value) is not None


def holds_module(value: Any) -> bool:
    """Whether a function or an object of the user contains a module of torch."""

    def inside(part: Any) -> Iterator[Any]:
        yield from (part(),) if isinstance(part, weakref.ref) else children_of(part)

    return any(isinstance(part, nn.Module) for part in walk([value], inside))
