"""Python values to a JSON header, a row of tensors and a row of file descriptors."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.wire.classes import is_all_fields, is_importable, plain_fields, signature, signed_name
from parallelformers_ng.wire.leaves import (
    DTYPE_NAMES,
    INLINE_BYTES,
    MAX_DEPTH,
    MAX_DESCRIPTORS,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_INTEGER_BITS,
    FileDescriptor,
    Handle,
    aligned,
)

Replace = Callable[[Any], Any]

_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A message in parts.

    Attributes:
        header: the JSON tree, ASCII.
        tensors: flat uint8 CPU tensors, in the order of their offsets.
        fds: descriptors to pass along; still owned by whoever made the message.
        size: bytes that the tensors take when each starts on an aligned offset.
    """

    header: bytes
    tensors: list[torch.Tensor]
    fds: list[int]
    size: int


def encode(obj: Any, key: bytes | None, replace: Replace | None = None, place: str = "") -> Encoded:
    """Take a value apart for the wire.

    Args:
        obj: the value.
        key: signs pickles and class names; with None, values that need either are refused.
        replace: called with every object that is no plain value, container or tensor. It returns the object itself,
            or a substitute to send instead, usually a `Handle`.
        place: what error messages call the value; by default, a dict is called by its keys.

    Raises:
        NotPortableError: a part of the value cannot be pickled, is nested too deep, or is too large for a header.
    """
    encoder = Encoder(key, replace, place)
    # A text stands alone: it takes the JSON encoder a tenth of the time, and a request is often no more than a name.
    header = _to_json(obj if type(obj) is str else [encoder.node(obj), encoder.table]).encode("ascii")
    if len(header) > MAX_HEADER_BYTES:
        raise NotPortableError(
            f"a message of {len(header)} bytes besides tensors exceeds {MAX_HEADER_BYTES}; put bulk data in tensors"
        )
    return Encoded(header, encoder.tensors, encoder.fds, encoder.size)


class Encoder:
    """One message in the making: the tree is returned by `node`, tensors and descriptors gather beside it."""

    def __init__(self, key: bytes | None, replace: Replace | None, place: str = "") -> None:
        self.key = key
        self.replace = replace
        self.table: list[list[Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.fds: list[int] = []
        self.size = 0
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}  # by id, which is only unique while its object lives
        self._path = [place] if place else []

    def node(self, obj: Any) -> Any:
        """The JSON form of a value."""
        kind = type(obj)
        if kind in _PLAIN:
            return obj
        method = _METHODS.get(kind)
        return self._special(obj) if method is None else method(self, obj)

    def substitute(self, obj: Any) -> Any:
        """What to send for `obj`: itself, or what the caller's hook puts in its place."""
        return obj if self.replace is None else self.replace(obj)

    def is_portable_tensor(self, obj: Any) -> bool:
        """True where the bytes of a tensor are all there is to it."""
        return obj.layout is torch.strided and obj.dtype in DTYPE_NAMES and obj.device.type != "meta"

    def _special(self, obj: Any) -> Any:
        stand_in = self.substitute(obj)
        if stand_in is not obj:
            return self._nested("", stand_in)
        cls: type = type(obj)
        numpy = sys.modules.get("numpy")
        if numpy is not None and (cls is numpy.ndarray or isinstance(obj, numpy.generic)):
            if obj.dtype.kind in "biufcSUmM" and obj.dtype.itemsize:
                return self._array(obj, cls is not numpy.ndarray)
            return self._pickle(obj)
        if is_importable(cls):
            if (
                isinstance(obj, tuple)
                and len(getattr(cls, "_fields", ())) == len(obj)
                and not getattr(obj, "__dict__", {})
            ):
                return ["nt", *self._reference(cls), *self._items(obj)]
            defaults = plain_fields(cls)
            if defaults is not None and is_all_fields(obj, defaults):
                # What is at its default is left out: most of a request and most of an output.
                fields = [(name, v) for name, default in defaults.items() if (v := getattr(obj, name)) is not default]
                values = [v if _is_plain(v) else self._nested(f".{name}", v) for name, v in fields]
                return ["dc", *self._reference(cls), [name for name, _ in fields], values]
        return self._pickle(obj)

    def _integer(self, obj: int) -> Any:
        if _is_plain(obj):
            return obj
        if obj.bit_length() > MAX_INTEGER_BITS:
            raise NotPortableError(
                f"{self._where()} is an int of {obj.bit_length()} bits; the limit is {MAX_INTEGER_BITS}"
            )
        return ["i", hex(obj)]

    def _nested(self, step: str, obj: Any) -> Any:
        if len(self._path) >= MAX_DEPTH:
            raise NotPortableError(
                f"{self._where()[:200]}… is nested deeper than {MAX_DEPTH} levels, or contains itself"
            )
        self._path.append(step)
        node = self.node(obj)
        self._path.pop()
        return node

    def _items(self, obj: Any) -> list[Any]:
        return [item if _is_plain(item) else self._nested(f"[{index}]", item) for index, item in enumerate(obj)]

    def _pairs(self, obj: Mapping[Any, Any]) -> list[Any]:
        nodes = []
        for key, value in obj.items():
            nodes.append(key if _is_plain(key) else self._nested(f"[{key!r}] (the key)", key))
            if not _is_plain(value):
                value = self._nested(key if not self._path and type(key) is str else f"[{key!r}]", value)
            nodes.append(value)
        return nodes

    def _bytes(self, data: bytes) -> Any:
        if len(data) <= INLINE_BYTES:
            return base64.b64encode(data).decode("ascii")
        return self._append(torch.frombuffer(bytearray(data), dtype=torch.uint8), "uint8", [len(data)])

    def _tensor(self, obj: torch.Tensor) -> Any:
        if id(obj) not in self._seen:
            if not self.is_portable_tensor(obj):
                return self._pickle(obj)
            self._seen[id(obj)] = self._append(_flat_bytes(obj), DTYPE_NAMES[obj.dtype], list(obj.shape)), obj
        return ["T", self._seen[id(obj)][0]]

    def _array(self, obj: Any, scalar: bool) -> Any:
        if obj.ndim > MAX_DIMENSIONS:
            raise NotPortableError(f"{self._where()} has {obj.ndim} dimensions; the limit is {MAX_DIMENSIONS}")
        return ["na", obj.dtype.str, list(obj.shape), scalar, self._bytes(obj.tobytes())]

    def _append(self, flat: torch.Tensor, dtype: str, shape: list[int]) -> int:
        if len(shape) > MAX_DIMENSIONS:
            raise NotPortableError(f"{self._where()} has {len(shape)} dimensions; the limit is {MAX_DIMENSIONS}")
        self.table.append([dtype, shape, self.size])
        self.tensors.append(flat)
        self.size += aligned(flat.numel())
        return len(self.table) - 1

    def _descriptor(self, obj: FileDescriptor) -> Any:
        if len(self.fds) >= MAX_DESCRIPTORS:
            raise NotPortableError(f"{self._where()}: more than {MAX_DESCRIPTORS} file descriptors in one message")
        self.fds.append(obj.fd)
        return ["fd", len(self.fds) - 1]

    def _reference(self, cls: type) -> list[str]:
        if self.key is None:
            raise self._unsigned()
        return signed_name(cls, self.key)

    def _sign(self, purpose: str, data: bytes) -> bytes:
        if self.key is None:
            raise self._unsigned()
        return signature(self.key, purpose, data)

    def _unsigned(self) -> NotPortableError:
        return NotPortableError(f"{self._where()} needs a signature, and this message is sent before there is a key")

    def _pickle(self, obj: Any) -> Any:
        # cloudpickle is needed by few messages, so the workers' start does not wait for its import.
        from parallelformers_ng.wire.by_value import ReferencePickler

        buffer = io.BytesIO()
        try:
            ReferencePickler(buffer, self._outside).dump(obj)
        except NotPortableError:
            raise
        except Exception as error:  # reducers are foreign code and raise anything
            place, culprit = self._blame(obj)
            raise NotPortableError(
                f"{place} (a {type(culprit).__module__}.{type(culprit).__qualname__}) cannot be sent to the workers by "
                f"value: {error}; leave out what cannot be pickled, or create it inside the worker"
            ) from error
        data = buffer.getvalue()
        return ["p", self._sign("pickle", data).hex(), self._bytes(data)]

    def _outside(self, obj: Any) -> Any:
        """What stands in a pickle for an object that goes beside it."""
        if type(obj) is torch.Tensor:
            return self.node(obj) if self.is_portable_tensor(obj) else None
        if type(obj) is FileDescriptor:
            return self.node(obj)
        stand_in = self.substitute(obj)
        return None if stand_in is obj else self.node(stand_in)

    def _blame(self, obj: Any) -> tuple[str, Any]:
        """Follow an object that cannot be pickled down to the innermost part that cannot."""
        from parallelformers_ng.wire.by_value import ReferencePickler

        place = self._where()
        for _ in range(8):
            for step, part in _parts(obj):
                try:
                    ReferencePickler(io.BytesIO(), Encoder(self.key, self.replace)._outside).dump(part)
                except Exception:  # the very failure that is being located
                    place, obj = place + step, part
                    break
            else:
                break
        return place, obj

    def _where(self) -> str:
        return "".join(self._path) or "the value"


def _parts(obj: Any) -> list[tuple[str, Any]]:
    if isinstance(obj, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(obj)]
    if isinstance(obj, Mapping):
        return [(f"[{key!r}]", value) for key, value in obj.items()]
    return [(f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items()] if not callable(obj) else []


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor on CPU, contiguous, as uint8 `[bytes]`."""
    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _is_plain(obj: Any) -> bool:
    """True for what JSON carries as it is."""
    kind = type(obj)
    return kind in _PLAIN or (kind is int and obj.bit_length() <= 64)


_PLAIN = frozenset({type(None), bool, float, str})
_METHODS: dict[type, Callable[[Encoder, Any], Any]] = {
    int: Encoder._integer,
    list: lambda self, obj: ["l", *self._items(obj)],
    tuple: lambda self, obj: ["t", *self._items(obj)],
    dict: lambda self, obj: ["d", *self._pairs(obj)],
    OrderedDict: lambda self, obj: ["od", *self._pairs(obj)],
    set: lambda self, obj: ["s", *self._items(obj)],
    frozenset: lambda self, obj: ["fs", *self._items(obj)],
    bytes: lambda self, obj: ["b", self._bytes(obj)],
    complex: lambda self, obj: ["c", obj.real, obj.imag],
    slice: lambda self, obj: ["sl", *self._items((obj.start, obj.stop, obj.step))],
    range: lambda self, obj: ["r", *self._items((obj.start, obj.stop, obj.step))],
    type(Ellipsis): lambda self, obj: ["e"],
    torch.dtype: lambda self, obj: ["dt", str(obj).removeprefix("torch.")],
    torch.device: lambda self, obj: ["dv", str(obj)],
    torch.Size: lambda self, obj: ["sz", *obj],
    torch.Tensor: Encoder._tensor,
    torch.nn.Parameter: Encoder._tensor,
    FileDescriptor: Encoder._descriptor,
    Handle: lambda self, obj: ["h", obj.kind, self._nested(".payload", obj.payload)],
}
