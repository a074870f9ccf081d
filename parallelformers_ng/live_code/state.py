"""Detects changes inside the objects that a program's code reads: dictionaries, lists, tensors and own objects."""

from __future__ import annotations

import argparse
import collections
import copyreg
import functools
import operator
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelformers_ng.live_code.functions import contents_of, function_behind
from parallelformers_ng.live_code.reach import LIBRARIES, package_of

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_MOST_ITEMS = 100_000


class State:
    """The mutable objects that a value contains, and what they contained when the state was made.

    A dictionary, a list, a set, a tensor, the attributes of an object of the program, and a variable of an enclosing
    function count.

    Args:
        value: value of a global, an attribute or a closure of the program.

    Attributes:
        is_too_large: whether the value has more than 100,000 parts, so that not all are followed.
    """

    def __init__(self, value: Any) -> None:
        self._parts: list[tuple[Any, tuple[Any, ...]]] = []
        seen: dict[int, Any] = {}
        pending, items = [value], 0
        while pending and items < _MOST_ITEMS:
            attributes = attributes_of(part := pending.pop())
            part = part if attributes is None else attributes
            if id(part) in seen or isinstance(part, PLAIN):
                continue
            seen[id(part)] = part  # an id is unique only while the object lives
            if (content := _content(part)) is not None:
                self._parts.append((part, content))
                items += len(content)
            pending += _inner(part)
        self.is_too_large = bool(pending)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def holds(self) -> bool:
        """Return whether every object contains what it contained at first."""
        return all(_are_same(_content(part), content) for part, content in self._parts)

    def has_other_code(self) -> bool:
        """Whether a function, a class or a module was put into, or taken out of, an object."""
        for part, before in self._parts:
            if not _are_same(now := _content(part), before):
                first, second = ({id(item): item for item in content} for content in (before, now or ()))
                if any(is_code({**first, **second}[each]) for each in first.keys() ^ second.keys()):
                    return True
        return False


def is_code(value: Any) -> bool:
    """Whether a value is code to the contract: a function, a method, a property, a class or a module."""
    return callable(value) or isinstance(value, types.ModuleType) or function_behind(value) is not None


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes of a namespace, or of an object of the program that is no module; None for other values."""
    if isinstance(value, (nn.Module, type, torch.Tensor, types.FunctionType, types.ModuleType)):
        return None
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace)) or package_of(type(value)) not in LIBRARIES:
        attributes: dict[str, Any] | None = getattr(value, "__dict__", None)
        return attributes
    return None


def _content(part: Any) -> tuple[Any, ...] | None:
    """Return what a mutable object contains now; None if the object is not followed."""
    if isinstance(part, dict):
        return (*part, *part.values())
    if isinstance(part, (list, set, collections.deque)):
        return tuple(part)
    if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
        address = part.data_ptr() if part.layout is torch.strided else 0
        return (address, part._version) if part.device.type != "meta" and not part.is_inference() else None
    if isinstance(part, types.CellType):
        return contents_of(part)
    if isinstance(part, np.ndarray):
        return tuple(part.flat) if part.dtype.hasobject else (part.shape, zlib.crc32(np.ascontiguousarray(part)))
    if package_of(type(part)) not in LIBRARIES and (slots := in_slots(part)):
        return tuple(slots.values())
    return None


def in_slots(value: Any) -> dict[str, Any]:
    """Return name → value of the attributes that an object has in slots, such as a dataclass with `slots=True`."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # as pickle finds them
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _are_same(now: tuple[Any, ...] | None, before: tuple[Any, ...]) -> bool:
    if now is None or len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(map(is_same, now, before))


def is_same(now: Any, before: Any) -> bool:
    """Whether two values are one object, or equal plain values."""
    return now is before or (type(now) is type(before) and isinstance(now, PLAIN) and bool(now == before))


def _inner(part: Any) -> Iterator[Any]:
    """Yield the values that a value contains."""
    if isinstance(part, types.MethodType):
        yield from (part.__func__, part.__self__)
    elif isinstance(part, functools.partial):
        yield from (part.func, part.args, part.keywords)
    elif (function := function_behind(part)) is not None:
        yield function
    elif isinstance(part, types.FunctionType) and package_of(part) not in LIBRARIES:
        yield from (part.__defaults__, part.__kwdefaults__, *(part.__closure__ or ()))
    elif isinstance(part, tuple):
        yield from part
    elif not isinstance(part, (nn.Module, type, torch.Tensor, np.ndarray, types.FunctionType, types.ModuleType)):
        yield from _content(part) or ()


def holds_module(value: Any, seen: frozenset[int] = frozenset()) -> bool:
    """Return whether a function or an object of the program's own class holds a module.

    Looks at defaults, variables of enclosing functions, arguments of partial functions, containers and attributes.

    Args:
        value: the function or object.
        seen: ids of values that need no second look.
    """
    if isinstance(value, nn.Module):
        return True
    if id(value) in seen:
        return False
    return any(holds_module(part, seen | {id(value)}) for part in _parts_of(value))


def _parts_of(value: Any) -> Iterator[Any]:
    """Yield the values that a function or an object holds."""
    if isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, getattr(value, "__wrapped__", None))
        for cell in value.__closure__ or ():
            yield from contents_of(cell)
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, weakref.ref):
        yield value()
    elif not isinstance(value, type) and package_of(type(value)) not in LIBRARIES:
        yield from getattr(value, "__dict__", {}).values()
