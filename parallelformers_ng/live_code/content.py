"""Computes digests of code that are equal in two processes if the code is equal."""

from __future__ import annotations

import collections
import functools
import hashlib
import marshal
import pickle
import sys
import types
from typing import Any

import numpy as np
import torch

from parallelformers_ng.live_code.functions import contents_of, function_behind
from parallelformers_ng.live_code.reach import LIBRARIES, package_of
from parallelformers_ng.live_code.state import attributes_of, in_slots
from parallelformers_ng.wire.signal_handlers import raise_if_of_handler

_LARGEST = 1 << 20
_PLAIN = (int, float, complex, str, bytes, bool, type(None), type(...), torch.dtype, torch.device)


def digest(value: Any) -> bytes:
    """Return an 8-byte BLAKE2b digest of a value (https://www.rfc-editor.org/rfc/rfc7693).

    The digest of a function covers its instructions, constants, defaults, module name and closure values. The digest of
    a class, a module or a built-in function covers its name. The digest of a method, a property or an object with
    `__wrapped__` covers the function or the getter.

    Numbers, strings, containers, partial functions, and CPU tensors of at most 1 MiB are digested by value. The digest
    of a namespace, or of an object of the program, covers its public attributes. The digest of an object of the
    standard library covers its pickle. The digest of any other object covers only the name of its class.
    """
    hasher = hashlib.blake2b(digest_size=8)
    _feed(hasher, value, frozenset())
    return hasher.digest()


def original(value: Any) -> Any:
    """Return the original of a function that this package has wrapped; return any other value unchanged."""
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        if not value.__globals__.get("__name__", "").startswith("parallelformers_ng."):
            break
        value = value.__wrapped__
    return value


def _feed(hasher: Any, value: Any, seen: frozenset[int]) -> None:
    """Add a value to a hash; `seen` has the ids of the values that contain this value."""
    if type(value) in _PLAIN:  # most values are; the other checks take time
        return hasher.update(f"{type(value).__name__}{value!r}".encode())
    value = original(value)
    if id(value) in seen:
        return hasher.update(b"again")
    inner = seen | {id(value)}
    kind: str = type(value).__name__
    hasher.update(kind.encode())
    if isinstance(value, types.FunctionType):
        hasher.update(instructions(value.__code__))
        hasher.update(
            str(value.__globals__.get("__name__")).encode()
        )  # equal code in another module uses other globals
        cells = map(contents_of, value.__closure__ or ())
        for part in (value.__defaults__, value.__kwdefaults__, *cells):
            _feed(hasher, part, inner)
    elif isinstance(value, functools.partial):
        for argument in (value.func, value.args, value.keywords):
            _feed(hasher, argument, inner)
    elif (function := function_behind(value)) is not None:
        _feed(hasher, function, inner)
    elif isinstance(value, type):
        hasher.update(f"{value.__module__}.{value.__qualname__}".encode())
    elif isinstance(value, types.ModuleType):
        hasher.update(value.__name__.encode())
    elif isinstance(value, _PLAIN):  # an enumeration, for example
        hasher.update(repr(value).encode())
    elif type(value) is torch.Tensor and value.device.type == "cpu" and value.nbytes <= _LARGEST:
        hasher.update(f"{value.shape}{value.dtype}".encode())
        hasher.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif type(value) in (tuple, list, collections.deque):
        for part in value:
            _feed(hasher, part, inner)
    elif type(value) is dict:
        for key, part in value.items():
            _feed(hasher, key, inner)
            _feed(hasher, part, inner)
    elif type(value) in (set, frozenset):
        hasher.update(b"".join(sorted(map(digest, value))))
    elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        _feed(hasher, wrapped, inner)
    elif type(value) is np.ndarray and value.nbytes <= _LARGEST and not value.dtype.hasobject:
        hasher.update(f"{value.shape}{value.dtype}".encode() + value.tobytes())
    elif (attributes := attributes_of(value) or _in_slots(value)) is not None:
        hasher.update(type(value).__qualname__.encode())
        _feed(hasher, {name: part for name, part in attributes.items() if not name.startswith("_")}, inner)
    else:
        hasher.update(str(getattr(value, "__qualname__", type(value).__qualname__)).encode())
        if type(value).__module__.partition(".")[0] in sys.stdlib_module_names - {"builtins"} and not callable(value):
            try:
                hasher.update(pickle.dumps(value, 5))  # of a decimal, an ordered dictionary, a pattern
            except Exception as error:  # a lock, for example; reducers may raise any exception
                raise_if_of_handler(error)


def _in_slots(value: Any) -> dict[str, Any] | None:
    """Return the attributes that an object of the program has in slots; None if it has none."""
    return None if package_of(type(value)) in LIBRARIES else in_slots(value) or None


def is_equal_code(first: Any, second: Any) -> bool:
    """Whether two functions compute the same, as after a reload of their module; a class equals only itself."""
    return isinstance(first, types.FunctionType) and type(first) is type(second) and digest(first) == digest(second)


@functools.cache
def instructions(code: types.CodeType) -> bytes:
    """Return a code object as bytes that are equal in every process that has read the same file.

    The bytes are in version 2 of the marshal format. Later versions have references, which depend on reference counts.
    """
    return marshal.dumps(_without_origin(code), 2)


def _without_origin(code: types.CodeType) -> types.CodeType:
    """Return a code object without its file, class and lines, which may differ between equal code objects."""
    constants = tuple(_without_origin(part) if isinstance(part, types.CodeType) else part for part in code.co_consts)
    return code.replace(co_filename="", co_qualname="", co_firstlineno=0, co_linetable=b"", co_consts=constants)
