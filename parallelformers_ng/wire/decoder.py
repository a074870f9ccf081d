"""A header, a run of tensor bytes and a row of file descriptors back to Python values.

Whatever the bytes are, the outcome is the value or a ProtocolError. Code runs only for parts that carry the group's
signature: pickles, and the names of classes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from parallelformers_ng.errors import NotPortableError, ProtocolError
from parallelformers_ng.wire.classes import field_defaults, is_model_output, signed_class, verify
from parallelformers_ng.wire.leaves import (
    ALIGNMENT,
    ALL_DTYPES,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_INTEGER_BITS,
    TENSOR_DTYPES,
    FileDescriptor,
    Handle,
)

Restore = Callable[[Handle], Any]

_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUmM][1-9]\d{0,8}(\[\w{1,8}\])?")
_from_json = json.JSONDecoder().raw_decode
_LEAVES = frozenset({str, int, float, bool, type(None)})  # nodes that are their own value
# What foreign bytes can provoke in json, torch, numpy and the constructors below.
_MALFORMED = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
    *(RuntimeError, MemoryError, SyntaxError),
)


def decode(
    header: bytes,
    blob: torch.Tensor,
    fds: list[int],
    key: bytes | None,
    restore: Restore | None = None,
) -> Any:
    """Put a value together again.

    Args:
        header: the JSON tree.
        blob: the tensors' bytes, uint8 `[size]`; the tensors in the value are views of it.
        fds: received descriptors. They belong to the value afterwards; if decoding fails, they are closed.
        key: what signatures are checked against; with None, parts that need one are refused.
        restore: turns each `Handle` into what it stands for; without it, handles stay handles.

    Raises:
        ProtocolError: the message is malformed, too large, or a signature is wrong.
        NotPortableError: a correctly signed object could not be rebuilt in this process.
    """
    try:
        if len(header) > MAX_HEADER_BYTES:
            raise ProtocolError(f"a header of {len(header)} bytes exceeds {MAX_HEADER_BYTES}")
        message, end = _from_json(header.decode("ascii"))
        if end != len(header):
            raise ProtocolError(f"a header of {len(header)} bytes ends after {end}")
        if type(message) is str and not fds:
            return message
        tree, table = message
        return Decoder(blob, fds, key, restore).message(tree, table)
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, _MALFORMED) and not isinstance(error, NotPortableError):
            raise ProtocolError(f"malformed message: {type(error).__name__}: {str(error)[:200]}") from error
        raise


class Decoder:
    """One message being read."""

    def __init__(self, blob: torch.Tensor, fds: list[int], key: bytes | None, restore: Restore | None) -> None:
        self._blob = blob
        self._fds = fds
        self._key = key
        self._restore = restore
        self._claimed: set[int] = set()
        self._tensors: list[torch.Tensor] = []
        self._depth = 0

    def message(self, tree: Any, table: Any) -> Any:
        """The value of a whole message."""
        self._tensors = [self._view(*row) for row in table]
        value = self.value(tree)
        if len(self._claimed) != len(self._fds):
            raise ProtocolError(f"{len(self._fds)} file descriptors came, {len(self._claimed)} are in the message")
        return value

    def value(self, node: Any) -> Any:
        """The value of one node of the tree."""
        if type(node) is not list:
            if type(node) is dict:
                raise ProtocolError("a JSON object has no meaning in a message")
            return node
        if self._depth >= MAX_DEPTH + 2:
            raise ProtocolError(f"nested deeper than {MAX_DEPTH} levels")
        self._depth += 1
        value = _METHODS[_text(node[0])](self, node)
        self._depth -= 1
        return value

    def _view(self, dtype_name: Any, shape: Any, offset: Any) -> torch.Tensor:
        dtype = TENSOR_DTYPES[_text(dtype_name)]
        if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
            raise ProtocolError(f"no shape of at most {MAX_DIMENSIONS} dimensions: {str(shape)[:80]}")
        size = math.prod(_natural(length) for length in shape) * dtype.itemsize
        start = _natural(offset)
        if start % ALIGNMENT or start + size > self._blob.numel():
            raise ProtocolError(f"a tensor at {start} + {size} does not lie in {self._blob.numel()} bytes, aligned")
        flat = self._blob[start : start + size].view(dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def _items(self, nodes: list[Any]) -> list[Any]:
        return [node if type(node) in _LEAVES else self.value(node) for node in nodes]

    def _pairs(self, nodes: list[Any]) -> list[tuple[Any, Any]]:
        if not nodes:
            return []
        if len(nodes) % 2:
            raise ProtocolError("a mapping with a key and no value")
        values = iter(self._items(nodes))
        return list(zip(values, values, strict=True))

    def _tensor(self, node: list[Any]) -> torch.Tensor:
        _tag, index = node
        return self._tensors[_natural(index)]

    def _bytes(self, node: Any) -> bytes:
        if type(node) is str:
            return base64.b64decode(node, validate=True)
        tensor = self._tensors[_natural(node)]
        if tensor.dtype is not torch.uint8:
            raise ProtocolError(f"bytes in a tensor of {tensor.dtype}")
        return tensor.numpy().tobytes()

    def _array(self, node: list[Any]) -> Any:
        import numpy

        _tag, dtype_name, shape, scalar, data = node
        if not _ARRAY_DTYPE.fullmatch(_text(dtype_name)):
            raise ProtocolError(f"no dtype of an array: {dtype_name[:40]!r}")
        if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
            raise ProtocolError("no shape of an array")
        lengths = [_natural(length) for length in shape]
        dtype, content = numpy.dtype(dtype_name), self._bytes(data)
        if math.prod(lengths) * dtype.itemsize != len(content):
            raise ProtocolError(f"an array of {dtype} {lengths} in {len(content)} bytes")
        array = numpy.frombuffer(bytearray(content), dtype).reshape(lengths)
        return array[()] if scalar is True else array

    def _integer(self, node: list[Any]) -> int:
        _tag, text = node
        if len(_text(text)) > MAX_INTEGER_BITS // 4 + 3:
            raise ProtocolError(f"an int of {len(text)} hexadecimal digits")
        return int(text, 16)

    def _descriptor(self, node: list[Any]) -> FileDescriptor:
        _tag, index = node
        descriptor = FileDescriptor(self._fds[_natural(index)])
        if index in self._claimed:
            raise ProtocolError("a file descriptor appears twice")
        self._claimed.add(index)
        return descriptor

    def _handle(self, node: list[Any]) -> Any:
        _tag, kind, payload = node
        handle = Handle(_text(kind), self.value(payload))
        return handle if self._restore is None else self._restore(handle)

    def _dtype(self, node: list[Any]) -> torch.dtype:
        _tag, name = node
        return ALL_DTYPES[_text(name)]

    def _device(self, node: list[Any]) -> torch.device:
        _tag, name = node
        return torch.device(_text(name))

    def _complex(self, node: list[Any]) -> complex:
        _tag, real, imaginary = node
        return complex(real, imaginary)

    def _slice(self, node: list[Any]) -> slice:
        start, stop, step = self._items(node[1:])
        return slice(start, stop, step)

    def _range(self, node: list[Any]) -> range:
        start, stop, step = self._items(node[1:])
        return range(start, stop, step)

    def _class(self, name: Any, signed: Any) -> type:
        if self._key is None:
            raise ProtocolError("a class came before there was a key to check its name with")
        return signed_class(self._key, _text(name), _text(signed))

    def _named_tuple(self, node: list[Any]) -> Any:
        cls = self._class(node[1], node[2])
        values = self._items(node[3:])
        if not (isinstance(cls, type) and issubclass(cls, tuple) and len(getattr(cls, "_fields", ())) == len(values)):
            raise ProtocolError(f"{node[1]} is no named tuple of {len(values)} fields")
        return tuple.__new__(cls, values)

    def _dataclass(self, node: list[Any]) -> Any:
        _tag, name, signed, names, nodes = node
        cls = self._class(name, signed)
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise ProtocolError(f"{name} is no dataclass")
        fields = field_defaults(cls)
        values = dict(zip(names, self._items(nodes), strict=True))
        if not values.keys() <= fields.keys() or any(
            default is dataclasses.MISSING and field not in values for field, default in fields.items()
        ):
            raise ProtocolError(f"{name} has other fields than {str(names)[:200]}")
        instance: Any = cls.__new__(cls)
        # The constructor is left out: it was run where the object was made, and its work is in the fields.
        mapping = is_model_output(cls)
        for field, default in fields.items():
            value = values.get(field, default)
            if mapping and value is not None:
                instance[field] = value
            else:
                object.__setattr__(instance, field, value)
        return instance

    def _pickle(self, node: list[Any]) -> Any:
        _tag, signed, packed = node
        data = self._bytes(packed)
        self._verify("pickle", data, signed)
        from parallelformers_ng.wire.by_value import ReferenceUnpickler

        try:
            return ReferenceUnpickler(data, self.value).load()
        except ProtocolError:
            raise
        except Exception as error:  # rebuilding an object runs its code
            raise NotPortableError(
                f"an object sent by value could not be rebuilt in this process: {type(error).__name__}: {error}"
            ) from error

    def _verify(self, purpose: str, data: bytes, signed: Any) -> None:
        if self._key is None:
            raise ProtocolError(f"a {purpose} came before there was a key to check it with")
        verify(self._key, purpose, data, _text(signed))


def _text(node: Any) -> str:
    if type(node) is not str:
        raise ProtocolError(f"a string was due, a {type(node).__name__} came")
    return node


def _natural(node: Any) -> int:
    if type(node) is not int or not 0 <= node < 1 << 62:
        raise ProtocolError(f"a length or index was due, {str(node)[:40]} came")
    return node


def _ellipsis(_decoder: Decoder, node: list[Any]) -> Any:
    if len(node) != 1:
        raise ProtocolError("an ellipsis carries nothing")
    return ...


_METHODS: dict[str, Callable[[Decoder, list[Any]], Any]] = {
    "l": lambda self, node: self._items(node[1:]),
    "t": lambda self, node: tuple(self._items(node[1:])),
    "d": lambda self, node: dict(self._pairs(node[1:])),
    "od": lambda self, node: OrderedDict(self._pairs(node[1:])),
    "s": lambda self, node: set(self._items(node[1:])),
    "fs": lambda self, node: frozenset(self._items(node[1:])),
    "sz": lambda self, node: torch.Size([_natural(length) for length in node[1:]]),
    "b": lambda self, node: self._bytes(*node[1:]),
    "e": _ellipsis,
    "i": Decoder._integer,
    "c": Decoder._complex,
    "sl": Decoder._slice,
    "r": Decoder._range,
    "dt": Decoder._dtype,
    "dv": Decoder._device,
    "T": Decoder._tensor,
    "na": Decoder._array,
    "nt": Decoder._named_tuple,
    "dc": Decoder._dataclass,
    "p": Decoder._pickle,
    "fd": Decoder._descriptor,
    "h": Decoder._handle,
}
