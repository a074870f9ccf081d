"""Frames back to Python values, out of a header, a run of tensor bytes and a row of file descriptors (`format.py`).

Whatever the bytes are, the outcome is the value or a ProtocolError. Code runs only for parts that carry the group's
signature: pickles, and the names of classes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
from collections.abc import Callable
from typing import Any

import torch

from parallelformers_ng.errors import NotPortableError, ProtocolError
from parallelformers_ng.wire.by_value import ReferenceUnpickler
from parallelformers_ng.wire.classes import field_defaults, is_model_output, signed_class, verify
from parallelformers_ng.wire.format import (
    ALIGNMENT,
    ALL_DTYPES,
    FIXED_PART,
    INLINE_TENSOR_BYTES,
    MAGIC,
    MAX_DEPTH,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_TENSOR_BYTES,
    TENSOR_DTYPES,
    VERSION,
    FileDescriptor,
    Flag,
    Kind,
)

_KINDS = {int(kind): kind for kind in Kind}
_ALL_FLAGS = Flag.MEMFD | Flag.RESET | Flag.EACH | Flag.TO_DEVICE
_from_json = json.JSONDecoder().raw_decode
_LEAVES = frozenset({str, int, float, bool, type(None)})  # nodes that are their own value
# What foreign bytes can provoke in json, torch and the constructors below.
_MALFORMED = (
    *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError),
    *(RuntimeError, MemoryError, SyntaxError),
)
_OF_DEVICES = (torch.OutOfMemoryError, torch.AcceleratorError)


@dataclasses.dataclass(slots=True)
class Frame:
    """A frame as received; its value is decoded on demand. One that is not decoded must be discarded."""

    kind: Kind
    flags: int
    sequence: int
    header: bytes
    blob: torch.Tensor = dataclasses.field(repr=False)
    fds: list[int]

    def decode(self, key: bytes | None, device: torch.device | None = None) -> Any:
        """The value of the frame, which now owns the descriptors; arguments and exceptions are those of `decode`."""
        fds, self.fds = self.fds, []
        return decode(self.header, self.blob, fds, key, device)

    def discard(self) -> None:
        """Close the descriptors that came with the frame."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def read_fixed_part(data: bytes | bytearray, begin: int, descriptors: int) -> tuple[Kind, int, int, int, int, int]:
    """Read the first bytes of a frame, before memory is set aside for the rest.

    Args:
        data: where they are, from `begin` on.
        begin: the size of FIXED_PART or more before the end of `data`.
        descriptors: how many file descriptors came; those of later frames may be among them.

    Returns:
        Kind, flags, sequence, bytes of the header, bytes of tensors, number of descriptors.

    Raises:
        ProtocolError: the bytes are no frame, or announce more than the limits allow.
    """
    magic, version, kind, flags, sequence, header_size, tensor_size, count = FIXED_PART.unpack_from(data, begin)
    if magic != MAGIC or version != VERSION or kind not in _KINDS or flags & ~_ALL_FLAGS:
        raise ProtocolError(f"no frame of this version: {bytes(data[begin : begin + FIXED_PART.size]).hex()}")
    shared = flags & Flag.MEMFD
    if header_size > MAX_HEADER_BYTES or tensor_size > (MAX_TENSOR_BYTES if shared else INLINE_TENSOR_BYTES):
        raise ProtocolError(f"a frame announces {header_size} + {tensor_size} bytes, beyond the limits")
    if count > descriptors or (shared and not count):
        raise ProtocolError(f"a frame announces {count} file descriptors, {descriptors} came")
    return _KINDS[kind], flags, sequence, header_size, tensor_size, count


def decode(
    header: bytes, blob: torch.Tensor, fds: list[int], key: bytes | None, device: torch.device | None = None
) -> Any:
    """Put a value together again.

    Args:
        header: the JSON tree.
        blob: the tensors' bytes, uint8 `[size]`; the tensors in the value are views of it.
        fds: received descriptors. They belong to the value afterwards; if decoding fails, they are closed.
        key: what signatures are checked against; with None, parts that need one are refused.
        device: where the tensors in the value are to be, in whatever object; they get there in one copy. None: they
            stay where they are.

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
        decoder = Decoder(blob, table, fds, key, device)
        value = decoder.value(tree)
        if len(decoder.claimed) != len(fds):
            raise ProtocolError(f"{len(fds)} file descriptors came, {len(decoder.claimed)} are in the message")
        return value
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, _MALFORMED) and not isinstance(error, (NotPortableError, *_OF_DEVICES)):
            raise ProtocolError(f"malformed message: {type(error).__name__}: {str(error)[:200]}") from error
        raise


class Decoder:
    """One message being read."""

    def __init__(
        self, blob: torch.Tensor, table: Any, fds: list[int], key: bytes | None, device: torch.device | None = None
    ) -> None:
        self._hosted = [self._view(blob, *row) for row in table]
        self._tensors = self._hosted
        if device is not None and device.type != "cpu" and table:
            there = blob.to(device)
            self._tensors = [self._view(there, *row) for row in table]
        self._fds = fds
        self.claimed: set[int] = set()  # indices of descriptors that the value has
        self._key = key
        self._depth = 0

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

    @staticmethod
    def _view(blob: torch.Tensor, dtype_name: Any, shape: Any, offset: Any) -> torch.Tensor:
        dtype = TENSOR_DTYPES[_text(dtype_name)]
        if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
            raise ProtocolError(f"no shape of at most {MAX_DIMENSIONS} dimensions: {str(shape)[:80]}")
        size = math.prod(_natural(length) for length in shape) * dtype.itemsize
        start = _natural(offset)
        if start % ALIGNMENT or start + size > blob.numel():
            raise ProtocolError(f"a tensor at {start} + {size} does not lie in {blob.numel()} bytes, aligned")
        flat = blob[start : start + size].view(dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def _items(self, nodes: list[Any]) -> list[Any]:
        return [node if type(node) in _LEAVES else self.value(node) for node in nodes]

    def _dict(self, node: list[Any]) -> dict[Any, Any]:
        items = iter(self._items(node[1:]))
        return dict(zip(items, items, strict=True))

    def _tensor(self, node: list[Any]) -> torch.Tensor:
        _tag, index = node
        return self._tensors[_natural(index)]

    def _bytes(self, node: Any) -> bytes:
        if type(node) is str:
            return base64.b64decode(node, validate=True)
        tensor = self._hosted[_natural(node)]
        if tensor.dtype is not torch.uint8:
            raise ProtocolError(f"bytes in a tensor of {tensor.dtype}")
        return tensor.numpy().tobytes()

    def _descriptor(self, node: list[Any]) -> FileDescriptor:
        _tag, index = node
        descriptor = FileDescriptor(self._fds[_natural(index)])
        if index in self.claimed:
            raise ProtocolError("a file descriptor appears twice")
        self.claimed.add(index)
        return descriptor

    def _dataclass(self, node: list[Any]) -> Any:
        _tag, name, signed, names, nodes = node
        cls = signed_class(self._checking_key("class"), _text(name), _text(signed))
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
        verify(self._checking_key("pickle"), "pickle", data, _text(signed))
        try:
            return ReferenceUnpickler(data, self.value).load()
        except ProtocolError:
            raise
        except Exception as error:  # rebuilding an object runs its code
            raise NotPortableError(
                f"an object sent by value could not be rebuilt in this process: {type(error).__name__}: {error}"
            ) from error

    def _checking_key(self, what: str) -> bytes:
        if self._key is None:
            raise ProtocolError(f"a {what} came before there was a key to check it with")
        return self._key


def _text(node: Any) -> str:
    if type(node) is not str:
        raise ProtocolError(f"a string was due, a {type(node).__name__} came")
    return node


def _natural(node: Any) -> int:
    if type(node) is not int or not 0 <= node < 1 << 62:
        raise ProtocolError(f"a length or index was due, {str(node)[:40]} came")
    return node


_METHODS: dict[str, Callable[[Decoder, list[Any]], Any]] = {
    "l": lambda self, node: self._items(node[1:]),
    "t": lambda self, node: tuple(self._items(node[1:])),
    "d": Decoder._dict,
    "b": lambda self, node: self._bytes(*node[1:]),
    "dt": lambda self, node: ALL_DTYPES[_text(*node[1:])],
    "T": Decoder._tensor,
    "dc": Decoder._dataclass,
    "p": Decoder._pickle,
    "fd": Decoder._descriptor,
}
