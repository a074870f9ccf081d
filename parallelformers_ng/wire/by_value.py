"""Pickles objects for the caller's own workers: by value if the workers cannot import them."""

from __future__ import annotations

import enum
import functools
import io
import pickle
import sys
import threading
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import torch


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    """Reduce a generator for pickle. Its state becomes bytes, because a message may move tensors to a device."""
    return _generator, (str(generator.device), generator.get_state().numpy().tobytes())


def _cached(parameters: dict[str, Any], function: Any) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached(function: Any) -> Any:
    """Reduce a function with `lru_cache` for pickle: by name if cloudpickle would use its name, otherwise by value."""
    place = cloudpickle.cloudpickle._lookup_module_and_qualname(function)
    if place is not None and not cloudpickle.cloudpickle._is_registered_pickle_by_value(place[0]):
        return function.__qualname__
    return _cached, (function.cache_parameters(), function.__wrapped__)


def _cached_property(function: Any, name: str | None) -> Any:
    prop = functools.cached_property(function)
    prop.attrname = name
    return prop


def _reduce_cached_property(prop: Any) -> tuple[Any, ...]:
    """Reduce a cached property without its lock, which Python 3.11 gives it."""
    return _cached_property, (prop.func, prop.attrname)


_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code_with_file(code: types.CodeType) -> tuple[Any, ...]:
    """Reduce a code object with its file name, which cloudpickle omits, so that ranks' tracebacks show source lines."""
    make, parts = _reduce_code(code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


_BY_VALUE = 6
"""Length of the tuple to which cloudpickle reduces a class or function by value."""
_numbers: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_own: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
"""Classes and functions that this process has sent by value. An answer with a copy of such an object gets the object
itself: a copy would fail `isinstance`, and cloudpickle would write the copy's state to the program's class."""
_lock = threading.Lock()


def _number_of(obj: Any) -> str:
    with _lock:
        number = _numbers.get(obj)
        if number is None:
            number = _numbers[obj] = uuid.uuid4().hex
            _own[number] = obj
        return number


def _find_or_make(number: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    obj = _own.get(number)
    if obj is None:
        obj = make(*args)
        with _lock:
            _numbers[obj] = number
    return obj


in_rank = False
"""Whether this process is a rank: there, functions of a module that the rank has imported get the module's globals."""


def _make_in_module(module: str, make: Callable[..., Any], code: types.CodeType, scope: Any, *rest: Any) -> Any:
    imported = sys.modules.get(module) if in_rank else None
    return make(code, scope if imported is None else vars(imported), *rest)


def _fill(obj: Any, numbered: tuple[str, Callable[[Any, Any], Any], Any]) -> None:
    number, fill, state = numbered
    if _own.get(number) is not obj:
        fill(obj, state)


class ByValuePickler(cloudpickle.Pickler):
    """Pickler that writes some classes and functions by value: those of `__main__`, a notebook or a registered module.

    `cloudpickle.register_pickle_by_value` registers a module. Functions that share a closure variable share it also in
    the process that reads the pickle.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {
            torch.Generator: _reduce_generator,
            types.CodeType: _reduce_code_with_file,
            functools._lru_cache_wrapper: _reduce_cached,
            functools.cached_property: _reduce_cached_property,
        }
    )

    def reducer_override(self, obj: Any) -> Any:
        """Reduce an object as cloudpickle does, but keep class names, slots and shared closures, which it loses."""
        if type(obj) is torch.Tensor and obj.dtype.itemsize == 1 and obj.is_floating_point():
            return torch.Tensor.view, (obj.view(torch.uint8), obj.dtype)  # torch cannot read float8 back from a pickle
        reduced = super().reducer_override(obj)
        if not isinstance(reduced, tuple) or len(reduced) != _BY_VALUE:
            return reduced
        make, args, state, *no_items, fill = reduced
        if isinstance(obj, type):
            state[0]["__qualname__"] = obj.__qualname__
            has_slots = "__slots__" in vars(obj) and NamedTuple not in vars(obj).get("__orig_bases__", ())
            if has_slots and not isinstance(obj, enum.EnumMeta):
                args[3]["__slots__"] = obj.__slots__  # type: ignore[attr-defined]  # else the copy has a `__dict__`
        else:
            *code, empty = args
            if empty:
                # Share cells: by default cloudpickle gives each function its own, and functions would no longer share a
                # variable.
                cells = zip(obj.__closure__, empty, strict=True)
                known = self.__dict__.setdefault("_cells", {})
                empty = tuple(known.setdefault(id(cell), new) for cell, new in cells)
            args = *code, empty
            module = sys.modules.get(obj.__module__ or "__main__")
            by_value = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
            if obj.__module__ not in by_value and module is not None and obj.__globals__ is vars(module):
                make, args = _make_in_module, (obj.__module__, make, *args)
        number = _number_of(obj)
        return _find_or_make, (number, make, args), (number, fill, state), *no_items, _fill


class ReferencePickler(ByValuePickler):
    """Pickler that writes references for some objects.

    Args:
        buffer: file to which the pickle is written.
        reference: function that returns an object's reference, which pickle must accept; None to write the object
            itself.
    """

    def __init__(self, buffer: io.BytesIO, reference: Callable[[Any], Any]) -> None:
        super().__init__(buffer)
        self.persistent_id = reference


class ReferenceUnpickler(pickle.Unpickler):
    """Unpickler for pickles of `ReferencePickler`."""

    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
