"""Python values to frames: a JSON header, a row of tensors and a row of file descriptors (`format.py`)."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.wire.by_value import ReferencePickler
from parallelformers_ng.wire.classes import is_model_output, portable_fields, signature, signed_name
from parallelformers_ng.wire.format import (
    ALIGNMENT,
    DTYPE_NAMES,
    FIXED_PART,
    INLINE_BYTES,
    INLINE_TENSOR_BYTES,
    MAGIC,
    MAX_DEPTH,
    MAX_DESCRIPTORS,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    VERSION,
    FileDescriptor,
    Flag,
    Kind,
    write_memfd,
)

_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclasses.dataclass(frozen=True, slots=True)
class Encoded:
    """A message in parts.

    Attributes:
        header: the JSON tree, ASCII.
        tensors: flat uint8 CPU tensors, each with its offset in bytes.
        fds: descriptors to pass along; the maker of the message still owns them.
        size: bytes that the tensors take when each starts on an aligned offset.
    """

    header: bytes
    tensors: list[tuple[int, torch.Tensor]]
    fds: list[int]
    size: int


@dataclasses.dataclass(slots=True)
class Packed:
    """A frame ready to be sent, to one receiver or to many. Close it afterwards."""

    sequence: int
    data: bytes
    fds: list[int]
    memfd: int | None = None

    def close(self) -> None:
        """Close this process's descriptor of the tensors; receivers have theirs."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


def pack(kind: Kind, sequence: int, encoded: Encoded, flags: int = 0) -> Packed:
    """Lay a message out as a frame.

    Raises:
        SharedMemoryError: the system has no memory left for the tensors.
    """
    tensors, fds, memfd = bytearray(), encoded.fds, None
    if encoded.size > INLINE_TENSOR_BYTES:
        memfd = write_memfd(encoded.tensors, encoded.size)
        fds, flags = [*fds, memfd], flags | Flag.MEMFD
    elif encoded.size:
        tensors = bytearray(encoded.size)
        for offset, tensor in encoded.tensors:
            tensors[offset : offset + tensor.numel()] = tensor.numpy().data
    fixed = FIXED_PART.pack(MAGIC, VERSION, kind, flags, sequence, len(encoded.header), encoded.size, len(fds))
    return Packed(sequence, fixed + encoded.header + tensors, fds, memfd)


def encode(obj: Any, key: bytes | None, place: str = "") -> Encoded:
    """Take a value apart for the wire.

    Args:
        obj: the value.
        key: signs pickles and class names; with None, values that need either are refused.
        place: what error messages call the value; by default, a dict is called by its keys.

    Raises:
        NotPortableError: a part of the value cannot be pickled, is nested too deep, or is too large for a header.
    """
    encoder = Encoder(key, place)
    # A text stands alone: it takes the JSON encoder a tenth of the time, and a request is often no more than a name.
    header = _to_json(obj if type(obj) is str else [encoder.node(obj), encoder.table]).encode("ascii")
    if len(header) > MAX_HEADER_BYTES:
        raise NotPortableError(
            f"a message of {len(header)} bytes besides tensors exceeds {MAX_HEADER_BYTES}; put bulk data in tensors"
        )
    return Encoded(header, encoder.tensors, encoder.fds, encoder.size)


class Encoder:
    """One message in the making: the tree is returned by `node`, tensors and descriptors gather beside it."""

    def __init__(self, key: bytes | None, place: str = "") -> None:
        self.key = key
        self.table: list[list[Any]] = []
        self.tensors: list[tuple[int, torch.Tensor]] = []
        self.fds: list[int] = []
        self.size = 0
        self._seen: dict[int, tuple[int, torch.Tensor]] = {}  # by id, which is only unique while its object lives
        self._path = [place] if place else []

    def node(self, obj: Any) -> Any:
        """The JSON form of a value."""
        if _is_plain(obj):
            return obj
        method = _METHODS.get(type(obj))
        return self._special(obj) if method is None else method(self, obj)

    def _is_portable_tensor(self, obj: Any) -> bool:
        """True where the bytes of a tensor are all there is to it."""
        return obj.layout is torch.strided and obj.dtype in DTYPE_NAMES and obj.device.type != "meta"

    def _special(self, obj: Any) -> Any:
        cls: type = type(obj)
        defaults = portable_fields(cls)
        if defaults is None or not (is_model_output(cls) or _is_all_fields(obj, defaults)):
            return self._pickle(obj)
        # What is at its default is left out: most of a request and most of an output.
        fields = [(name, v) for name, default in defaults.items() if (v := getattr(obj, name)) is not default]
        values = [v if _is_plain(v) else self._nested(f".{name}", v) for name, v in fields]
        return ["dc", *signed_name(cls, self._signing_key()), [name for name, _ in fields], values]

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
            if not self._is_portable_tensor(obj):
                return self._pickle(obj)
            if obj.ndim > MAX_DIMENSIONS:
                raise NotPortableError(f"{self._where()} has {obj.ndim} dimensions; the limit is {MAX_DIMENSIONS}")
            self._seen[id(obj)] = self._append(_flat_bytes(obj), DTYPE_NAMES[obj.dtype], list(obj.shape)), obj
        return ["T", self._seen[id(obj)][0]]

    def _append(self, flat: torch.Tensor, dtype: str, shape: list[int]) -> int:
        self.table.append([dtype, shape, self.size])
        self.tensors.append((self.size, flat))
        self.size += -(-flat.numel() // ALIGNMENT) * ALIGNMENT
        return len(self.table) - 1

    def _descriptor(self, obj: FileDescriptor) -> Any:
        limit = MAX_DESCRIPTORS - 1  # one is for the tensors
        if len(self.fds) >= limit:
            raise NotPortableError(f"{self._where()}: more than {limit} file descriptors in one message")
        self.fds.append(obj.fd)
        return ["fd", len(self.fds) - 1]

    def _signing_key(self) -> bytes:
        if self.key is None:
            raise NotPortableError(f"{self._where()} needs a signature, and this message is sent before there is a key")
        return self.key

    def _pickle(self, obj: Any) -> Any:
        try:
            data = self._pickled(obj)
        except NotPortableError:
            raise
        except Exception as error:  # reducers are foreign code and raise anything
            place, culprit = self._blame(obj)
            raise NotPortableError(
                f"{place} (a {type(culprit).__module__}.{type(culprit).__qualname__}) cannot be sent to the workers by "
                f"value: {error}; leave out what cannot be pickled, or create it inside the worker"
            ) from error
        return ["p", signature(self._signing_key(), "pickle", data).hex(), self._bytes(data)]

    def _pickled(self, obj: Any) -> bytes:
        buffer = io.BytesIO()
        ReferencePickler(buffer, self._outside).dump(obj)
        return buffer.getvalue()

    def _outside(self, obj: Any) -> Any:
        """What stands in a pickle for an object that goes beside it; None for one that goes through it."""
        beside = type(obj) is FileDescriptor or (type(obj) is torch.Tensor and self._is_portable_tensor(obj))
        return self.node(obj) if beside else None

    def _blame(self, obj: Any) -> tuple[str, Any]:
        """Follow an object that cannot be pickled down to the innermost part that cannot."""
        place = self._where()
        for _ in range(8):
            for step, part in _parts(obj):
                try:
                    Encoder(self.key)._pickled(part)
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


def _is_all_fields(obj: Any, names: Mapping[str, Any]) -> bool:
    """True where the fields are all that a dataclass instance holds."""
    return getattr(obj, "__dict__", {}).keys() <= names.keys() and all(hasattr(obj, name) for name in names)


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
    list: lambda self, obj: ["l", *self._items(obj)],
    tuple: lambda self, obj: ["t", *self._items(obj)],
    dict: lambda self, obj: ["d", *self._pairs(obj)],
    bytes: lambda self, obj: ["b", self._bytes(obj)],
    torch.dtype: lambda self, obj: ["dt", str(obj).removeprefix("torch.")],
    torch.Tensor: Encoder._tensor,
    torch.nn.Parameter: Encoder._tensor,
    FileDescriptor: Encoder._descriptor,
}
