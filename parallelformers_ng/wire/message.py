"""Encodes Python values as messages: a pickle, and the bytes of tensors and open files outside the pickle.

The reader of a message trusts the writer: reader and writer are a process and its fork, on a socket pair without name.
Between hosts, `signed.py` checks a signature before a message is read.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parallelformers_ng.errors import NotPortableError, ProtocolError
from parallelformers_ng.origins import CORE
from parallelformers_ng.wire.by_value import ByValuePickler
from parallelformers_ng.wire.frame import (
    ALIGNMENT,
    FIXED_PART,
    INLINE_BYTES,
    MAGIC,
    MAX_DESCRIPTORS,
    MAX_OUTSIDE,
    VERSION,
    FileDescriptor,
    Flag,
    Frame,
    FrameKind,
    Packed,
    close_all,
    map_memfd,
    own_copy,
    write_memfd,
)
from parallelformers_ng.wire.signal_handlers import is_of_handler, raise_if_of_handler

TENSOR_CLASSES: set[type] = {torch.Tensor}
"""Tensor classes that can be sent as bytes, data type and shape alone."""
_DTYPE_OF_NAME = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPE_OF_NAME.items()}
_SIZE_BYTES = 8  # a size is an int64
_FILE = -1  # size field of an open file, which has no bytes in the message
_NAMED = frozenset({type, types.FunctionType})
_OWN_BYTES = 128 << 10
_MAX_OWN = 64
"""An answer sends several tensors of at least 128 KiB in memory of their own, at most 64: a tensor that the program
keeps must not keep the memory of all others. The caller copies smaller tensors, which is as fast."""


@dataclass(slots=True)
class Encoded:
    """An encoded value: a pickle, and the tensors and open files outside the pickle.

    Attributes:
        pickle: pickle of the value, with references to the objects outside.
        outside: bytes of each tensor, and None for each open file, in the order of their references in the pickle.
        fds: file descriptors to send, which still belong to the process that encoded the value.
    """

    pickle: memoryview
    outside: list[memoryview | None]
    fds: list[int]


NOTHING = Encoded(memoryview(b""), [], [])
"""Encoded form of a frame without a message."""


def encode(value: Any, place: str = "") -> Encoded:
    """Pickle a value.

    The result shares the memory of contiguous CPU tensors in the value, so these tensors must not change before the
    value is sent. Other tensors are copied to the CPU. `place` is the name of the value in error messages; by default,
    errors name the keys of a dict.
    """
    buffer = io.BytesIO()
    pickler = _MessagePickler(buffer)
    try:
        pickler.dump(value)
    except Exception as error:  # a `__reduce__` of the user may raise any error
        if isinstance(error, NotPortableError) or is_of_handler(error):
            raise
        raise _not_portable(value, place, error) from error
    if len(pickler.fds) >= MAX_DESCRIPTORS or len(pickler.outside) > MAX_OUTSIDE:
        raise NotPortableError(
            f"a message with {len(pickler.fds)} file descriptors and {len(pickler.outside)} tensors is too large"
        )
    return Encoded(buffer.getbuffer(), pickler.outside, pickler.fds)


def pack(kind: FrameKind, sequence: int, encoded: Encoded, flags: int = 0, apart: bool = False) -> Packed:
    """Pack a message into a frame. With `apart`, each of several large tensors gets a memfd of its own."""
    memfds, large = list[int](), dict[int, memoryview]()
    try:
        if apart and not encoded.fds:
            large = {i: part for i, part in enumerate(encoded.outside) if part is not None and len(part) >= _OWN_BYTES}
        own = [*large][:_MAX_OWN] if len(large) > 1 else []
        for index in own:
            memfds.append(write_memfd([large[index]], len(large[index])))
        parts, size = _parts(encoded, own)
        if size > INLINE_BYTES:
            memfds.append(write_memfd(parts, size))
            parts, flags = [], flags | Flag.MEMFD
    except BaseException:
        close_all(memfds)
        raise
    fds = [*encoded.fds, *memfds]
    fixed = FIXED_PART.pack(MAGIC, VERSION, kind, flags, sequence, size, len(encoded.outside), len(fds))
    return Packed(b"".join([fixed, *parts]), fds, memfds)


def parcel(value: Any) -> tuple[bytes, int]:
    """Encode a value as bytes for another message, and count the objects outside its pickle; `unpack` decodes both."""
    encoded = encode(value)
    if encoded.fds:
        raise NotPortableError("open files cannot be sent with this call")
    return b"".join(_parts(encoded)[0]), len(encoded.outside)


def unpack(data: bytes, outside: int, device: torch.device | None = None) -> Any:
    """Decode a value that `parcel` encoded, with its tensors on `device`."""
    return decode(Frame(FrameKind.REQUEST, 0, 0, own_copy(memoryview(data), outside), outside, []), device)


def _parts(encoded: Encoded, own: Collection[int] = ()) -> tuple[list[bytes | memoryview], int]:
    """Return a message as a list of buffers, with padding, and its size in bytes. The tensors with indices in `own` are
    left out, because they are sent in memfds of their own."""
    if not encoded.pickle:
        return [], 0
    sizes = [len(encoded.pickle), *(_FILE if part is None else len(part) for part in encoded.outside)]
    for index in own:
        sizes[1 + index] = _FILE - sizes[1 + index]
    parts: list[bytes | memoryview] = [struct.pack(f"<{len(sizes)}q", *sizes), encoded.pickle]
    end = len(sizes) * _SIZE_BYTES + len(encoded.pickle)
    for part, written in zip(encoded.outside, sizes[1:], strict=True):
        if part is not None and written > _FILE:
            padding = _aligned(end) - end
            parts += [bytes(padding), part]
            end += padding + len(part)
    return parts, end


def decode(frame: Frame, device: torch.device | None = None) -> Any:
    """Decode the message of a frame. Its tensors are views of the frame's memory, or of one copy on the device.

    Afterwards the value owns the frame's descriptors; if decoding fails, `decode` closes the descriptors.
    """
    fds, frame.fds = frame.fds, []
    descriptors = iter([*fds])
    try:
        pickled, parts = _parts_of(frame)
        outside = _outside(frame, device, parts, descriptors, fds)
        value = pickle.loads(pickled, buffers=outside)
        if next(outside, None) is not None or next(descriptors, None) is not None:
            raise ProtocolError("a message does not use all tensors and files that came with it")
        return value
    except BaseException as error:
        close_all(fds)
        passed_on = (ProtocolError, NotPortableError, torch.OutOfMemoryError, torch.AcceleratorError)
        if isinstance(error, passed_on) or not isinstance(error, Exception) or is_of_handler(error):
            raise
        # Unpickling runs code of the object's class, which may raise any error.
        raise NotPortableError(
            f"an object that was sent could not be rebuilt in this process: {type(error).__name__}: {error}"
        ) from error
    finally:
        frame.body = memoryview(b"")  # frees the body: the group's thread refers to the frame until the next request


def _parts_of(frame: Frame) -> tuple[memoryview, list[tuple[int, int]]]:
    """Return the pickle of a frame, and `(offset, size)` of each object outside the pickle.

    The size of an open file is -1. The size of a tensor in a memfd of its own is -1 minus its number of bytes.
    """
    head = (1 + frame.outside) * _SIZE_BYTES
    if len(frame.body) < head:
        raise ProtocolError(f"a message of {len(frame.body)} bytes announces {frame.outside} objects")
    size, *sizes = struct.unpack_from(f"<{1 + frame.outside}q", frame.body)
    if size < 0:
        raise ProtocolError(f"a message with a part of {size} bytes")
    end = head + size
    parts: list[tuple[int, int]] = []
    for each in sizes:
        parts.append((_aligned(end), each))
        if each > _FILE:
            end = _aligned(end) + each
    if end != len(frame.body):
        raise ProtocolError(f"a message of {len(frame.body)} bytes announces {end}")
    return frame.body[head : head + size], parts


def _outside(
    frame: Frame, device: torch.device | None, parts: list[tuple[int, int]], fds: Iterator[int], open_fds: list[int]
) -> Iterator[Any]:
    """Yield each object outside the pickle, in order: the bytes of a tensor, uint8 `[bytes]`, or a file descriptor.

    On CPU each tensor has a storage of its own, so that saving it saves no other bytes, and its version counter is its
    own.
    """
    on_device = None
    if parts and device is not None and device.type != "cpu":
        on_device = torch.frombuffer(frame.body, dtype=torch.uint8).to(device)
    copies = frame.kind is FrameKind.RESULT and len(frame.body) > INLINE_BYTES and len(parts) > 1
    for offset, size in parts:
        if size > _FILE:
            if on_device is not None:
                yield on_device[offset : offset + size]
            elif not size:
                yield torch.empty(0, dtype=torch.uint8)
            else:
                flat = torch.frombuffer(frame.body, dtype=torch.uint8, count=size, offset=offset)
                yield flat.clone() if copies and size < len(frame.body) // 2 else flat
        elif (fd := next(fds, None)) is None:
            raise ProtocolError("a message names more file descriptors than came with it")
        elif size == _FILE:
            yield fd
        else:
            mapped = map_memfd(fd, _FILE - size)
            open_fds.remove(fd)
            os.close(fd)
            yield torch.frombuffer(mapped, dtype=torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _tensor(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return flat.view(_DTYPE_OF_NAME[dtype]).view(shape)


class _MessagePickler(ByValuePickler):
    """Pickler that puts the bytes of tensors, and open files, outside the pickle."""

    def __init__(self, buffer: io.BytesIO) -> None:
        # Returning True keeps a buffer inside the pickle; pickle asks for each buffer, also for those of numpy.
        super().__init__(buffer, buffer_callback=lambda buffer: id(buffer) not in self._mine)
        self.outside: list[memoryview | None] = []
        self.fds: list[int] = []
        # Buffers of tensors and files, by id. The reference to a buffer keeps its id from being reused.
        self._mine: dict[int, pickle.PickleBuffer] = {}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        is_plain = kind in TENSOR_CLASSES and obj.layout is torch.strided and obj.device.type != "meta"
        if is_plain and not obj.is_quantized:
            return _tensor, (self._beside(_flat_bytes(obj)), _NAME_OF_DTYPE[obj.dtype], tuple(obj.shape))
        if kind is FileDescriptor:
            return FileDescriptor, (self._beside(bytearray(1), obj.fd),)
        if kind in _NAMED and _is_of_library(obj):
            return NotImplemented  # pickle by name, which is faster than cloudpickle's search
        if isinstance(obj, (type, types.FunctionType)):
            return super().reducer_override(obj)
        return super(ByValuePickler, self).reducer_override(obj)  # skips the slower method of `ByValuePickler`

    def _beside(self, data: Any, fd: int | None = None) -> pickle.PickleBuffer:
        buffer = pickle.PickleBuffer(data)
        self._mine[id(buffer)] = buffer
        self.outside.append(buffer.raw() if fd is None else None)
        if fd is not None:
            self.fds.append(fd)
        return buffer


def _is_of_library(obj: Any) -> bool:
    name: str = obj.__module__ or ""
    return name.partition(".")[0] in CORE and getattr(sys.modules.get(name), obj.__qualname__, None) is obj


def _flat_bytes(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg().to("cpu")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _not_portable(value: Any, place: str, error: Exception) -> NotPortableError:
    """Return the error for a value that cannot be pickled. The error names the innermost value with this problem."""
    if isinstance(error.__cause__ or error, RecursionError):  # cloudpickle raises its own error from the RecursionError
        return NotPortableError(f"{place or 'the value'} is nested too deeply")
    is_top = not place and type(value) is dict
    for _ in range(16):
        for step, part in _steps(value):
            if not _is_portable(part):
                place, value = step.strip("[]'") if is_top else place + step, part
                is_top = False
                break
        else:
            break
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return NotPortableError(
        f"{place or 'the value'} (a {kind}) cannot be sent to the workers by value: {error}; leave out what cannot be"
        " pickled, or create it inside the worker"
    )


def _is_portable(value: Any) -> bool:
    try:
        _MessagePickler(io.BytesIO()).dump(value)
    except Exception as error:  # any error means that the value cannot be sent
        raise_if_of_handler(error)
        return False
    return True


def _steps(value: Any) -> list[tuple[str, Any]]:
    """Return the values directly inside a value, each after the expression that selects it, `[0]` or `.name`."""
    if isinstance(value, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if callable(value):
        return []
    return [(f".{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
