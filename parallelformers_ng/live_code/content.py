"""Computes digests of code that are equal in two processes if the code is equal."""

from __future__ import annotations

import collections
import functools
import hashlib
import itertools
import marshal
import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from parallelformers_ng.live_code.functions import contents_of, function_behind
from parallelformers_ng.live_code.object_graph import attributes_of
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
    """The original of a function that this package has wrapped; any other value unchanged."""
    while isinstance(value, types.FunctionType) and hasattr(value, "__wrapped__"):
        if not value.__globals__.get("__name__", "").startswith("parallelformers_ng."):
            break
        value = value.__wrapped__
    return value


def _feed(hasher: Any, value: Any, seen: frozenset[int]) -> None:
    """Add a value to a hash; `seen` has the ids of the values that contain this value."""
    if type(value) in _PLAIN:  # a fast path, because most values are numbers or strings
        return hasher.update(f"{type(value).__name__}{value!r}".encode())
    value = original(value)
    if id(value) in seen:
        return hasher.update(b"again")
    text, parts = _described(value)
    hasher.update(type(value).__name__.encode() + text)
    for part in parts:
        _feed(hasher, part, seen | {id(value)})


def _described(value: Any) -> tuple[bytes, Iterable[Any]]:
    """Return what the digest of a value must cover: bytes, and further values to digest."""
    if isinstance(value, types.FunctionType):
        module = str(value.__globals__.get("__name__"))  # equal code in another module uses other globals
        cells = map(contents_of, value.__closure__ or ())
        return instructions(value.__code__) + module.encode(), (value.__defaults__, value.__kwdefaults__, *cells)
    if isinstance(value, functools.partial):
        return b"", (value.func, value.args, value.keywords)
    if (function := function_behind(value)) is not None:
        return b"", (function,)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}".encode(), ()
    if isinstance(value, types.ModuleType):
        return value.__name__.encode(), ()
    if isinstance(value, _PLAIN):  # an enumeration, for example
        return repr(value).encode(), ()
    if isinstance(value, (tuple, list, collections.deque)):
        return b"", value
    if isinstance(value, dict):
        return b"", itertools.chain.from_iterable(dict.items(value))
    if isinstance(value, (set, frozenset)):
        return b"".join(sorted(map(digest, value))), ()
    if isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
        return b"", (wrapped,)
    if type(value) is torch.Tensor and value.device.type == "cpu" and value.nbytes <= _LARGEST:
        values = value.detach().contiguous().flatten().view(torch.uint8).numpy()
        return f"{value.shape}{value.dtype}".encode() + values.tobytes(), ()
    if type(value) is np.ndarray and value.nbytes <= _LARGEST and not value.dtype.hasobject:
        return f"{value.shape}{value.dtype}".encode() + value.tobytes(), ()
    if attributes := attributes_of(value):
        public = {name: part for name, part in attributes.items() if not name.startswith("_")}
        return type(value).__qualname__.encode(), (public,)
    text = str(getattr(value, "__qualname__", type(value).__qualname__)).encode()
    if type(value).__module__.partition(".")[0] in sys.stdlib_module_names - {"builtins"} and not callable(value):
        try:
            text += pickle.dumps(value, 5)  # a decimal or a compiled pattern, for example
        except Exception as error:  # pickling may raise any exception, for a lock for example
            raise_if_of_handler(error)
    return text, ()


def is_equal_code(first: Any, second: Any) -> bool:
    """Whether two functions compute the same, as after a reload of their module; a class equals only itself."""
    return isinstance(first, types.FunctionType) and type(first) is type(second) and digest(first) == digest(second)


@functools.cache
def instructions(code: types.CodeType) -> bytes:
    """A code object as bytes that are equal in every process that has read the same file.

    The bytes are in version 2 of the marshal format. Later versions have references, which depend on reference counts.
    """
    return marshal.dumps(_without_origin(code), 2)


def _without_origin(code: types.CodeType) -> types.CodeType:
    """A code object without its file, class and lines, which may differ between equal code objects."""
    constants = tuple(_without_origin(part) if isinstance(part, types.CodeType) else part for part in code.co_consts)
    return code.replace(co_filename="", co_qualname="", co_firstlineno=0, co_linetable=b"", co_consts=constants)
