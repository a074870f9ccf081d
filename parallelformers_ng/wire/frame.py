"""Defines frames, in which messages go between two processes: their layout, limits, and shared memory for large ones.

A frame:

    fixed part | sizes | pickle | tensor bytes      [+ file descriptors, SCM_RIGHTS]

`sizes` has one int64 for the pickle and one for each object outside the pickle: the bytes of a tensor, -1 for an open
file, or -1 - the bytes of a tensor in a memfd of its own. Each tensor begins on a cache line. A variable part (all but
the fixed part) longer than 64 KiB is written once into a sealed memfd. All receivers get the memfd's descriptor and map
the memfd privately and writable. No process copies the memfd, writes stay private, and no name appears in /dev/shm.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import resource
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.errors import ProtocolError, SharedMemoryError

MAX_BYTES = 1 << 42
MAX_DESCRIPTORS = 253  # the kernel's limit for one message, SCM_MAX_FD
MAX_OUTSIDE = 1 << 20
INLINE_BYTES = 64 << 10
ALIGNMENT = 64

MAGIC = b"pfng"
VERSION = 2
FIXED_PART = struct.Struct("<4sBBHQQII")
"""Magic, version, kind, flags, sequence, bytes of the variable part, number of objects outside the pickle, number of
descriptors."""
OUT_OF_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
"""Error numbers of a memfd that cannot grow."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class FrameKind(enum.IntEnum):
    REQUEST = 1
    RESULT = 2
    ERROR = 3
    EVENT = 4
    READY = 5
    GOODBYE = 6
    UPDATE = 8  # changes by other threads of the caller to the running request's arguments
    DONE = 7  # the request succeeded, and the rank sends no value; the frame has no message


class Flag:
    """Bits of a frame's flags. The bits are plain ints, because operators of enum.IntFlag take microseconds."""

    MEMFD = 1  # the variable part of the frame is in a memfd, the last descriptor
    RESET = 2  # the rank resets its communicator before it runs this request
    EACH = 4  # every rank sends its value; without this bit only rank 0 does
    TO_DEVICE = 8  # the rank puts the tensors on its device


_KINDS = {int(kind): kind for kind in FrameKind}
_ALL_FLAGS = Flag.MEMFD | Flag.RESET | Flag.EACH | Flag.TO_DEVICE


@dataclass(frozen=True, slots=True)
class FileDescriptor:
    """Wraps a file descriptor in a message, so that the open file is sent to the other process.

    The sender keeps its own descriptor. The receiver gets a new descriptor, which it must close.
    """

    fd: int

    def close(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True)
class Handle:
    """Refers, in a message, to an object that is not sent: it stays with the sender, or the receiver has it already."""

    kind: str
    payload: Any = None


@dataclass(slots=True)
class Packed:
    """A frame ready to be sent to one or more receivers. The sender must close it after sending.

    Attributes:
        data: bytes of the frame; if the part of variable length is in a memfd, only the fixed part.
        fds: descriptors to send, with the memfd as the last descriptor if there is a memfd.
        memfds: those of `fds` that are memfds: of tensors, and of a part that is not in `data`.
    """

    data: bytes
    fds: list[int]
    memfds: list[int]

    def close(self) -> None:
        close_all(self.memfds)


@dataclass(slots=True)
class Frame:
    """A received frame. The receiver must decode its message or discard the frame.

    Attributes:
        kind: purpose of the frame.
        flags: bits of `Flag`.
        sequence: number of the request that the frame belongs to.
        body: variable part, in memory of this process; aligned and writable if the message has tensors.
        outside: number of objects outside the pickle.
        fds: descriptors of the open files that came with the frame.
    """

    kind: FrameKind
    flags: int
    sequence: int
    body: memoryview = field(repr=False)
    outside: int
    fds: list[int]

    def discard(self) -> None:
        close_all(self.fds)


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def read_fixed_part(data: bytes | bytearray, begin: int, descriptors: int) -> tuple[FrameKind, int, int, int, int, int]:
    """Decode and check the fixed part of a frame, before any memory is allocated for the variable part.

    `descriptors` is the number of received file descriptors, possibly with descriptors of later frames. Return kind,
    flags, sequence, bytes of the variable part, number of objects outside the pickle, number of descriptors.
    """
    magic, version, kind, flags, sequence, size, outside, count = FIXED_PART.unpack_from(data, begin)
    if magic != MAGIC or version != VERSION or kind not in _KINDS or flags & ~_ALL_FLAGS:
        raise ProtocolError(f"no frame of this version: {bytes(data[begin : begin + FIXED_PART.size]).hex()}")
    shared = flags & Flag.MEMFD
    if size > (MAX_BYTES if shared else INLINE_BYTES) or outside > MAX_OUTSIDE:
        raise ProtocolError(f"a frame announces {size} bytes and {outside} objects, beyond the limits")
    if count > descriptors or (shared and not count):
        raise ProtocolError(f"a frame announces {count} file descriptors, but {descriptors} came")
    return _KINDS[kind], flags, sequence, size, outside, count


def why_no_memory(error: OSError) -> str:
    """Describe an error with a number in `OUT_OF_MEMORY`; for EFBIG, name this process's file-size limit."""
    if error.errno != errno.EFBIG:
        return str(error.strerror)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return f"this process may not make files of more than {limit} bytes, not even in memory (raise `ulimit -f`)"


def write_memfd(parts: Iterable[bytes | memoryview], size: int) -> int:
    """Write `parts`, together `size` bytes, to a new sealed memfd; return its descriptor, for the caller to close."""
    fd = os.memfd_create("parallelformers_ng", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserve all memory before the first write, so that a lack of memory is an error here, not a SIGBUS later.
        os.posix_fallocate(fd, 0, size)
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(fd, rest) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in OUT_OF_MEMORY:
            raise SharedMemoryError(
                f"no memory for a message of {size} bytes: {why_no_memory(error)}; "
                "send smaller batches, or raise the memory limit of the container"
            ) from error
        raise
    return fd


def own_copy(body: memoryview, outside: int) -> memoryview:
    """Copy a frame's body out of the receive buffer. If objects are outside the pickle, align the copy for tensors.

    Some kernels need tensors in memory that is aligned to 64 bytes, as torch's memory is (`gAlignment` in its
    `c10/core/alignment.h`).
    """
    if not outside:
        return memoryview(bytes(body))
    copy = memoryview(torch.empty(len(body), dtype=torch.uint8, device="cpu").numpy())
    copy[:] = body
    return copy


def map_memfd(fd: int, size: int) -> memoryview:
    """Map the first `size` bytes of a received memfd, privately and writable. The caller may then close `fd`."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        length = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"a message came in a file that is no memfd: {error}") from error
    if seals & _SEALS != _SEALS or length < size or not size:
        raise ProtocolError(f"a memfd of {length} bytes with seals {seals:#x} is not a sealed message of {size} bytes")
    # Unlike mmap.mmap, this mapping keeps no descriptor open while its tensors exist.
    mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8)
    return memoryview(mapped.numpy())
