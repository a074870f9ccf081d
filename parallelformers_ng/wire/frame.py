"""How messages lie between two processes: frames, their limits, and the sealed memory of large ones.

A frame:

    fixed part | sizes | pickle | tensor bytes      [+ file descriptors, SCM_RIGHTS]

`sizes` has an int64 for the pickle and one for each object that lies outside of it: bytes of a tensor, or -1 for an
open file. Each tensor begins on a cache line. A variable part longer than 64 KiB is written once into a sealed memfd.
All receivers get its descriptor and map it privately and writable: nobody copies it, writes stay private, and nothing
has a name in /dev/shm.
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
MAX_DESCRIPTORS = 253  # SCM_MAX_FD of the kernel
MAX_OUTSIDE = 1 << 20
INLINE_BYTES = 64 << 10
ALIGNMENT = 64

MAGIC = b"pfng"
VERSION = 2
FIXED_PART = struct.Struct("<4sBBHQQII")
"""Magic, version, kind, flags, sequence, bytes that follow, number of objects outside the pickle, of descriptors."""
OUT_OF_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
"""Numbers of the errors of a memfd that cannot grow."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class FrameKind(enum.IntEnum):
    """The purpose of a frame."""

    REQUEST = 1
    RESULT = 2
    ERROR = 3
    EVENT = 4
    READY = 5
    GOODBYE = 6
    DONE = 7  # the request ran; the value of this rank is None, or not wanted. The frame has no message


class Flag:
    """Bits of a frame. Plain ints: the operators of enum.IntFlag take microseconds."""

    MEMFD = 1  # what follows the fixed part is in the last descriptor
    RESET = 2  # the communicator is reset before this request runs
    EACH = 4  # every rank answers with its own value, not rank 0 alone
    TO_DEVICE = 8  # the tensors go to the device of the rank


_KINDS = {int(kind): kind for kind in FrameKind}
_ALL_FLAGS = Flag.MEMFD | Flag.RESET | Flag.EACH | Flag.TO_DEVICE


@dataclass(frozen=True, slots=True)
class FileDescriptor:
    """A value that carries an open file to the other process.

    The sender keeps its own descriptor; the receiver gets a new one, owns it, and closes it.

    Args:
        fd: a descriptor of this process.
    """

    fd: int

    def close(self) -> None:
        """Close the descriptor in this process."""
        os.close(self.fd)


@dataclass(frozen=True)
class Handle:
    """A value that stands for an object which stays in the process that sent it.

    Args:
        kind: kind of the object, for example `"cache"`.
        payload: a value by which the owner finds the object again.
    """

    kind: str
    payload: Any = None


@dataclass(slots=True)
class Packed:
    """A frame ready to be sent, to one receiver or to many. Close it afterwards."""

    data: bytes
    fds: list[int]
    memfd: int | None = None

    def close(self) -> None:
        """Close this process's descriptor of the memfd; receivers have theirs."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


@dataclass(slots=True)
class Frame:
    """A frame as received. One whose message is not decoded has to be discarded.

    Attributes:
        body: variable part, in memory of this process; aligned, and writable, if there are tensors.
        outside: number of objects outside the pickle.
        fds: open files that came with it.
    """

    kind: FrameKind
    flags: int
    sequence: int
    body: memoryview = field(repr=False)
    outside: int
    fds: list[int]

    def discard(self) -> None:
        """Close the descriptors that came with the frame."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@dataclass(slots=True)
class FixedPart:
    """The first bytes of a frame, see `FIXED_PART`."""

    kind: FrameKind
    flags: int
    sequence: int
    size: int
    outside: int
    descriptors: int

    @classmethod
    def read(cls, data: bytes | bytearray, begin: int, descriptors: int) -> FixedPart:
        """Read them, before memory is set aside for the rest.

        Args:
            data: bytes, from `begin` on at least those of `FIXED_PART`.
            begin: offset of the frame.
            descriptors: number of file descriptors that came; those of later frames may be among them.

        Raises:
            ProtocolError: the bytes are no frame, or announce more than the limits allow.
        """
        magic, version, kind, flags, sequence, size, outside, count = FIXED_PART.unpack_from(data, begin)
        if magic != MAGIC or version != VERSION or kind not in _KINDS or flags & ~_ALL_FLAGS:
            raise ProtocolError(f"no frame of this version: {bytes(data[begin : begin + FIXED_PART.size]).hex()}")
        shared = flags & Flag.MEMFD
        if size > (MAX_BYTES if shared else INLINE_BYTES) or outside > MAX_OUTSIDE:
            raise ProtocolError(f"a frame announces {size} bytes and {outside} objects, beyond the limits")
        if count > descriptors or (shared and not count):
            raise ProtocolError(f"a frame announces {count} file descriptors, {descriptors} came")
        return cls(_KINDS[kind], flags, sequence, size, outside, count)


def why_no_memory(error: OSError) -> str:
    """Say what an error out of `OUT_OF_MEMORY` means; a limit of this process is named."""
    if error.errno != errno.EFBIG:
        return str(error.strerror)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return f"this process may make no files of more than {limit} bytes, in memory neither (raise `ulimit -f`)"


def write_memfd(parts: Iterable[tuple[int, memoryview]], size: int) -> int:
    """Make a sealed memfd of bytes.

    Args:
        parts: offset and bytes of each part.
        size: bytes of all.

    Returns:
        Its descriptor, which the caller closes.

    Raises:
        SharedMemoryError: the system has no memory left for them.
    """
    fd = os.memfd_create("parallelformers_ng", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved before the first byte, so that a lack of memory is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, size)
        for offset, rest in parts:
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
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


def aligned_memory(size: int) -> memoryview:
    """Return memory of torch, whose alignment some kernels rely on; the caller's default device may be another."""
    return memoryview(torch.empty(size, dtype=torch.uint8, device="cpu").numpy())


def own_copy(body: memoryview, outside: int) -> memoryview:
    """Return the body of a frame in memory of its own; tensors outside of the pickle can use that memory."""
    if not outside:
        return memoryview(bytes(body))
    copy = aligned_memory(len(body))
    copy[:] = body
    return copy


def map_memfd(fd: int, size: int) -> memoryview:
    """Map the bytes of a memfd that came, privately and writable. The descriptor may be closed afterwards.

    Raises:
        ProtocolError: the file is no sealed memfd of that size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        length = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"a message came in a file that is no memfd: {error}") from error
    if seals & _SEALS != _SEALS or length < size or not size:
        raise ProtocolError(f"a memfd of {length} bytes with seals {seals:#x} cannot hold {size} bytes for good")
    # Unlike mmap.mmap, this keeps no descriptor open for as long as the tensors live.
    mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8)
    return memoryview(mapped.numpy())
