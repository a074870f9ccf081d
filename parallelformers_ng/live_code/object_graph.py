"""Walks over all objects inside a value, and detects whether the contents of an object changed."""

from __future__ import annotations

import argparse
import array
import collections
import copyreg
import enum
import functools
import operator
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria

from parallelformers_ng.live_code.functions import contents_of, function_behind
from parallelformers_ng.origins import is_known

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size)
PLAIN_TYPES = frozenset(PLAIN)
CODE = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType, nn.Module)
_OF_THE_USER = (
    types.SimpleNamespace, argparse.Namespace, collections.UserDict, collections.UserList, collections.ChainMap,
    LogitsProcessor, StoppingCriteria, BaseException,
)  # fmt: skip
"""Classes of libraries whose objects have the user's values as attributes."""
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
"""Classes of bound methods, also of C, such as `seen.append`; the `__self__` of a function of C is its module."""
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)


def walk(roots: Iterable[Any], inside: Callable[[Any], Iterable[Any]]) -> Iterator[Any]:
    """Yield every object in some values once, except plain values, in an order that is the same in every process.

    Args:
        roots: the values.
        inside: function that returns the values directly inside an object; it is called after the object was yielded.
    """
    seen, pending = dict[int, Any](), [*roots][::-1]
    while pending:
        value = pending.pop()
        if type(value) not in PLAIN_TYPES and id(value) not in seen:
            seen[id(value)] = value  # keeps the object alive, because Python reuses the id of a deleted object
            yield value
            pending += [*inside(value)][::-1]


def children_of(value: Any) -> Iterator[Any]:
    """Yield the values directly inside a value. Classes, modules, tensors and arrays have none here."""
    if isinstance(value, _METHODS):
        yield from (getattr(value, "__func__", None), value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, value.keywords)
    elif (function := function_behind(value)) is not None:
        yield function
    elif isinstance(value, types.FunctionType) and not is_known(value):
        yield from (value.__defaults__, value.__kwdefaults__, *(value.__closure__ or ()))
    elif isinstance(value, types.CellType):
        yield from contents_of(value)
    elif isinstance(value, dict):
        for item in value.items():
            yield from item
    elif isinstance(value, _SEQUENCES):
        yield from value
    elif isinstance(value, np.random.Generator):
        yield value.bit_generator
    if not isinstance(value, type) and isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        yield wrapped
    if attributes := attributes_of(value):
        yield from (attributes[name] for name in sorted(attributes))


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Attributes of an object of the user: of the user's own class, or a namespace. None for any other value."""
    if isinstance(value, (*CODE, torch.Tensor, enum.Enum)):
        return None
    return own_attributes(value) if isinstance(value, _OF_THE_USER) or not is_known(type(value)) else None


def own_attributes(value: Any) -> dict[str, Any] | None:
    """An object's attributes by name, from `__dict__` and `__slots__`; without slots, `__dict__` itself, not a copy."""
    attributes: dict[str, Any] | None = getattr(value, "__dict__", None)
    names = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # as pickle finds them
    return {**(attributes or {}), **{n: getattr(value, n) for n in names if hasattr(value, n)}} if names else attributes


def items_of(value: Any) -> Any:
    """The present contents of a mutable object, apart from attributes; None for any other object.

    A dictionary, list, set or deque is the result itself, so take a `snapshot`. Any other result is a value that is
    different after the next change.
    """
    if isinstance(value, (dict, list, set, collections.deque)):
        return value
    if isinstance(value, types.CellType):
        return contents_of(value)
    if isinstance(value, torch.Tensor):
        if value.device.type == "meta" or value.is_inference():
            return None
        return value.shape, value._version, value.data_ptr() if value.layout is torch.strided else 0
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return tuple(value.flat)
        return value.shape, zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
    if isinstance(value, array.array):
        return value.typecode, value.tobytes()
    return bytes(value) if isinstance(value, bytearray) else None


def snapshot(contents: Any) -> Any:
    """Copy a result of `attributes_of` or `items_of`, for a later comparison: a dictionary, set, tuple or bytes."""
    if isinstance(contents, dict):
        return dict(contents.items())
    if isinstance(contents, set):
        return set(contents)
    return tuple(contents) if isinstance(contents, (list, collections.deque)) else contents


def values_in(contents: Any) -> Iterable[Any]:
    return contents.values() if isinstance(contents, dict) else contents if isinstance(contents, (tuple, set)) else ()


def has_same(now: Any, before: Any) -> bool:
    """Whether contents are those of an earlier snapshot: the same objects in the same order, or equal plain values."""
    if isinstance(before, dict):
        return len(now) == len(before) and _all_same(now, before) and _all_same(now.values(), before.values())
    if isinstance(before, tuple):
        return len(now) == len(before) and _all_same(now, before)
    return bool(now == before)


def _all_same(now: Iterable[Any], before: Iterable[Any]) -> bool:
    # `is_same` is Python code, and another thread may change `now` while it runs, so it gets a copy.
    return all(map(operator.is_, now, before)) or all(map(is_same, [*now], before))


def is_same(now: Any, before: Any) -> bool:
    """Whether two values are one object, or equal plain values, or tuples of such values."""
    if now is before or type(now) is not type(before):
        return now is before
    if isinstance(now, PLAIN):
        return bool(now == before)
    return isinstance(now, tuple) and len(now) == len(before) and all(map(is_same, now, before))


def checksum(tensor: torch.Tensor) -> int:
    parts = [tensor] if tensor.layout is torch.strided else tensor.__reduce_ex__(4)[1][1]  # indices and values
    tensors = (part.detach().cpu().contiguous() for part in parts if isinstance(part, torch.Tensor))
    # Copies, because `numpy` would forbid later changes of the tensor's size.
    values = (part.reshape(-1).view(torch.uint8).clone().numpy() for part in tensors)
    return functools.reduce(lambda before, part: zlib.crc32(part, before), values, 0)
