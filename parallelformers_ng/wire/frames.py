"""Frames of the control channel, and tensors in anonymous memory that travels with them.

    fixed part | header (JSON, may be empty) | tensor bytes, up to 64 KiB      [+ file descriptors, SCM_RIGHTS]

Larger tensors are written once into a sealed memfd, which goes to any number of receivers as a file descriptor; each
maps it privately, so nothing is copied, nobody sees another's writes, and nothing ever has a name in /dev/shm.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import struct
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.errors import ProtocolError, SharedMemoryError
from parallelformers_ng.wire.decoder import Restore, decode
from parallelformers_ng.wire.encoder import Encoded
from parallelformers_ng.wire.leaves import MAX_DESCRIPTORS, MAX_HEADER_BYTES, MAX_TENSOR_BYTES, aligned

INLINE_TENSOR_BYTES = 64 << 10
OUT_OF_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)  # what a memfd that cannot grow gives

_MAGIC = b"pfng"
_VERSION = 1
_FIXED = struct.Struct("<4sBBHQIQI")  # magic, version, kind, flags, sequence, header and tensor bytes, descriptors
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Kind(enum.IntEnum):
    """What a frame is for."""

    REQUEST = 1
    RESULT = 2
    ERROR = 3
    EVENT = 4
    READY = 5
    GOODBYE = 6
    DONE = 7  # the request ran; this rank's value is None, or not wanted. The frame has no header


class Flag:
    """How a frame is to be read: bits of plain ints, since enum.IntFlag takes microseconds per operation."""

    MEMFD = 1  # the tensors are in the last descriptor
    RESET = 2  # the communicator is to be reset before this request runs
    EACH = 4  # every rank answers with its own value, not rank 0 alone


_KINDS = {int(kind): kind for kind in Kind}
_ALL_FLAGS = Flag.MEMFD | Flag.RESET | Flag.EACH


@dataclass(slots=True)
class Packed:
    """A frame ready to be sent, to one receiver or to many. Close it afterwards."""

    sequence: int
    data: bytes
    fds: list[int]
    memfd: int | None = None

    def close(self) -> None:
        """Give up this process's hold on the tensors; receivers keep theirs."""
        if self.memfd is not None:
            os.close(self.memfd)
            self.memfd = None


@dataclass(slots=True)
class Frame:
    """A frame as received; its value is decoded on demand. One that is not decoded must be discarded."""

    kind: Kind
    flags: int
    sequence: int
    header: bytes
    blob: torch.Tensor = field(repr=False)
    fds: list[int]

    def decode(self, key: bytes | None, restore: Restore | None) -> Any:
        """The value of the frame, which now owns the descriptors. Raises what `decoder.decode` raises."""
        fds, self.fds = self.fds, []
        return decode(self.header, self.blob, fds, key, restore)

    def discard(self) -> None:
        """Close the descriptors that came with the frame."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []


def pack(kind: Kind, sequence: int, encoded: Encoded, flags: int = 0) -> Packed:
    """Lay a message out as a frame.

    Raises:
        SharedMemoryError: the system has no memory left for the tensors.
    """
    body, fds, memfd = encoded.header, encoded.fds, None
    if len(fds) >= MAX_DESCRIPTORS:
        raise ProtocolError(f"{len(fds)} file descriptors in one message; the limit is {MAX_DESCRIPTORS - 1}")
    if encoded.size > INLINE_TENSOR_BYTES:
        memfd = _write_memfd(encoded)
        fds, flags = [*fds, memfd], flags | Flag.MEMFD
    elif encoded.size:
        rows = (tensor.numpy().tobytes() for tensor in encoded.tensors)
        body += b"".join(row.ljust(aligned(len(row)), b"\0") for row in rows)
    fixed = _FIXED.pack(_MAGIC, _VERSION, kind, flags, sequence, len(encoded.header), encoded.size, len(fds))
    return Packed(sequence, fixed + body, fds, memfd)


def _write_memfd(encoded: Encoded) -> int:
    fd = os.memfd_create("parallelformers_ng", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved before the first byte, so that a lack of memory is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, encoded.size)
        offset = 0
        for tensor in encoded.tensors:
            rest, position = memoryview(tensor.numpy().data), offset
            while rest:
                written = os.pwrite(fd, rest, position)
                rest, position = rest[written:], position + written
            offset += aligned(tensor.numel())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in OUT_OF_MEMORY:
            raise SharedMemoryError(
                f"no memory for a message with {encoded.size} bytes of tensors: {error.strerror}; "
                "send smaller batches, or raise the memory limit of the container"
            ) from error
        raise
    return fd


def map_memfd(fd: int, size: int) -> torch.Tensor:
    """The tensor bytes of a frame that came in a memfd, uint8 `[size]`. The descriptor may be closed afterwards.

    Raises:
        ProtocolError: the file is no sealed memfd of that size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        length = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"the tensors came in a file that is no memfd: {error}") from error
    if seals & _SEALS != _SEALS or length < size or not size:
        raise ProtocolError(f"a memfd of {length} bytes with seals {seals:#x} cannot hold {size} bytes for good")
    # Unlike mmap.mmap, this keeps no descriptor open for as long as the tensors live.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8)


FIXED_SIZE = _FIXED.size


def read_fixed_part(data: bytes | bytearray, begin: int, descriptors: int) -> tuple[Kind, int, int, int, int, int]:
    """Read the first bytes of a frame, before memory is set aside for the rest.

    Args:
        data: where they are, from `begin` on.
        begin: FIXED_SIZE bytes or more before the end of `data`.
        descriptors: how many file descriptors came; those of later frames may be among them.

    Returns:
        Kind, flags, sequence, bytes of the header, bytes of tensors, number of descriptors.

    Raises:
        ProtocolError: the bytes are no frame, or announce more than the limits allow.
    """
    magic, version, kind, flags, sequence, header_size, tensor_size, count = _FIXED.unpack_from(data, begin)
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS or flags & ~_ALL_FLAGS:
        raise ProtocolError(f"no frame of this version: {bytes(data[begin : begin + FIXED_SIZE]).hex()}")
    shared = flags & Flag.MEMFD
    if header_size > MAX_HEADER_BYTES or tensor_size > (MAX_TENSOR_BYTES if shared else INLINE_TENSOR_BYTES):
        raise ProtocolError(f"a frame announces {header_size} + {tensor_size} bytes, beyond the limits")
    if count > descriptors or (shared and not count):
        raise ProtocolError(f"a frame announces {count} file descriptors, {descriptors} came")
    return _KINDS[kind], flags, sequence, header_size, tensor_size, count
