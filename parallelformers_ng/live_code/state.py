"""Detects changes inside the objects that a program's code reads: dictionaries, lists, tensors and own objects."""

from __future__ import annotations

import argparse
import collections
import copyreg
import functools
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from parallelformers_ng.live_code.reach import LIBRARIES, contents_of, function_behind, package_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_MOST = 500
_LONGEST = 1000
_LARGEST_ARRAY = 1 << 16


class State:
    """The mutable objects that a value contains, and what they contained when the state was made.

    A dictionary, a list, a set, a tensor, the attributes of an object of the program, and a variable of an enclosing
    function count. At most 500 objects are followed, and none beyond a container of more than 1000 items.

    Args:
        value: value of a global, an attribute or a closure of the program.
    """

    def __init__(self, value: Any) -> None:
        self._parts: list[tuple[Any, tuple[Any, ...]]] = []
        seen: dict[int, Any] = {}
        pending = [value]
        while pending and len(self._parts) < _MOST:
            attributes = attributes_of(part := pending.pop())
            part = part if attributes is None else attributes
            if id(part) in seen:
                continue
            seen[id(part)] = part  # an id is unique only while the object lives
            if (content := _content(part)) is not None:
                self._parts.append((part, content))
            pending += _inner(part)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def holds(self) -> bool:
        """Return whether every object contains what it contained at first."""
        return all(_is_same(_content(part), content) for part, content in self._parts)


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
        return (*part, *part.values()) if len(part) <= _LONGEST else (len(part),)
    if isinstance(part, (list, set, collections.deque)):
        return tuple(part) if len(part) <= _LONGEST else (len(part),)
    if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
        address = part.data_ptr() if part.layout is torch.strided else 0
        return (address, part._version) if part.device.type != "meta" and not part.is_inference() else None
    if isinstance(part, types.CellType):
        return contents_of(part)
    if isinstance(part, np.ndarray):
        return (part.tobytes() if part.nbytes <= _LARGEST_ARRAY and not part.dtype.hasobject else part.shape,)
    if package_of(type(part)) not in LIBRARIES and (slots := in_slots(part)):
        return tuple(slots.values())
    return None


def in_slots(value: Any) -> dict[str, Any]:
    """Return name → value of the attributes that an object has in slots, such as a dataclass with `slots=True`."""
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # as pickle finds them
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _is_same(now: tuple[Any, ...] | None, before: tuple[Any, ...]) -> bool:
    return now is not None and len(now) == len(before) and all(map(_is_equal, now, before))


def _is_equal(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and bool(now == before))


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
        yield from part[:_LONGEST]
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
