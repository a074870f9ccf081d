"""Pickles objects for the caller's own workers: an object that workers cannot import is pickled by value."""

from __future__ import annotations

import functools
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch


def _generator(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def _reduce_generator(generator: torch.Generator) -> tuple[Any, ...]:
    """Reduce a generator for pickle. Its state goes as bytes, because tensors of a message may go to a device."""
    return _generator, (str(generator.device), generator.get_state().numpy().tobytes())


def _cached(parameters: dict[str, Any], function: Any) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_cached(function: Any) -> Any:
    """Reduce a function with `lru_cache`: by name or by value, as cloudpickle reduces a function without it."""
    place = cloudpickle.cloudpickle._lookup_module_and_qualname(function)
    if place is not None and not cloudpickle.cloudpickle._is_registered_pickle_by_value(place[0]):
        return function.__qualname__
    return _cached, (function.cache_parameters(), function.__wrapped__)


_reduce_code = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _reduce_code_with_file(code: types.CodeType) -> tuple[Any, ...]:
    """Reduce a code object with its file name, which cloudpickle leaves out: tracebacks of ranks can show its lines."""
    make, parts = _reduce_code(code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


_PARTS_OF_CLASS = 6
"""Length of the tuple to which cloudpickle reduces a class by value; its third part is the state of the class."""


class ByValuePickler(cloudpickle.Pickler):
    """Pickler that writes some classes and functions by value: those of `__main__`, a notebook or a registered module.

    `cloudpickle.register_pickle_by_value` registers a module.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {
            torch.Generator: _reduce_generator,
            types.CodeType: _reduce_code_with_file,
            functools._lru_cache_wrapper: _reduce_cached,
        }
    )

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a class by value with its qualified name, which cloudpickle leaves out: changes of a class name it."""
        if type(obj) is torch.Tensor and obj.dtype.itemsize == 1 and obj.is_floating_point():
            return torch.Tensor.view, (obj.view(torch.uint8), obj.dtype)  # torch cannot read float8 back from a pickle
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == _PARTS_OF_CLASS:
            attributes, _ = reduced[2]
            attributes["__qualname__"] = obj.__qualname__
        return reduced


class ReferencePickler(ByValuePickler):
    """Pickler that writes references for some objects.

    Args:
        buffer: file to which the pickle is written.
        reference: function that returns an object's reference, which pickle must accept; None to write the object
            itself.
    """

    def __init__(self, buffer: io.BytesIO, reference: Callable[[Any], Any]) -> None:
        super().__init__(buffer, protocol=5)
        self.persistent_id = reference


class ReferenceUnpickler(pickle.Unpickler):
    """Unpickler for pickles of `ReferencePickler`.

    Args:
        data: the pickle.
        resolve: function that returns the object of a reference.
    """

    def __init__(self, data: bytes, resolve: Callable[[Any], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._resolve = resolve

    def persistent_load(self, pid: Any) -> Any:
        return self._resolve(pid)
