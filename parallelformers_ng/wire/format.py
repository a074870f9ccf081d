"""What both ends of a control channel must agree on: how frames and messages are laid out, and their limits.

A frame:

    fixed part | header (JSON, may be empty) | tensor bytes, up to 64 KiB      [+ file descriptors, SCM_RIGHTS]

Larger tensors are written once into a sealed memfd, which goes to any number of receivers as a file descriptor; each
maps it privately, so nothing is copied, nobody sees another's writes, and nothing ever has a name in /dev/shm.

The header is a message without its tensors: a JSON tree, or a single string. In the tree, None, bool, float, str and
64-bit int stand for themselves; everything else is an array whose first item is a tag, as in:

    ["l", 1, 2]                          the list [1, 2]           ["t", …] a tuple   ["d", k, v, …] a dict
    ["T", 0]                             tensor 0 of the table [[dtype, shape, offset], …] that follows the tree
    ["dc", "pkg.mod:Name", mac, […], …]  a dataclass or ModelOutput: the fields that are not at their defaults
    ["p", mac, "…"]                      a pickle, for all other values; read only if its signature is right
    ["fd", 0]                            an open file

A byte string of more than 1 KiB is a uint8 tensor of the table, so headers stay small.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import resource
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from parallelformers_ng.errors import ProtocolError, SharedMemoryError

MAX_DEPTH = 100  # containers within containers
MAX_HEADER_BYTES = 64 << 20
MAX_TENSOR_BYTES = 1 << 42
MAX_DESCRIPTORS = 253  # the kernel's SCM_MAX_FD
MAX_DIMENSIONS = 64
INLINE_BYTES = 1024  # longer byte strings and pickles travel with the tensors, not in the header
INLINE_TENSOR_BYTES = 64 << 10
ALIGNMENT = 64  # bytes; every tensor of a message starts on a cache line

MAGIC = b"pfng"
VERSION = 1
FIXED_PART = struct.Struct("<4sBBHQIQI")  # magic, version, kind, flags, sequence, header and tensor bytes, descriptors
OUT_OF_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)  # what a memfd that cannot grow gives


def why_no_memory(error: OSError) -> str:
    """What an error out of `OUT_OF_MEMORY` says, in words; a limit of this process is named."""
    if error.errno != errno.EFBIG:
        return str(error.strerror)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return f"this process may make no files of more than {limit} bytes, in memory neither (raise `ulimit -f`)"


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
TENSOR_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TENSOR_DTYPES.items()}
ALL_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}


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
    TO_DEVICE = 8  # the tensors are wanted on the device of the rank


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
        kind: what it stands for, for example `"cache"`.
        payload: any encodable value that lets the owner find the object again.
    """

    kind: str
    payload: Any = None


def write_memfd(tensors: Iterable[tuple[int, torch.Tensor]], size: int) -> int:
    """A sealed memfd with tensors in it, each at its offset.

    Args:
        tensors: offsets in bytes, and flat uint8 CPU tensors.
        size: of all, in bytes.

    Returns:
        Its descriptor, which the caller closes.

    Raises:
        SharedMemoryError: the system has no memory left for them.
    """
    fd = os.memfd_create("parallelformers_ng", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved before the first byte, so that a lack of memory is an error here and not a SIGBUS later.
        os.posix_fallocate(fd, 0, size)
        for offset, tensor in tensors:
            rest = memoryview(tensor.numpy().data)
            while rest:
                written = os.pwrite(fd, rest, offset)
                rest, offset = rest[written:], offset + written
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError) and error.errno in OUT_OF_MEMORY:
            raise SharedMemoryError(
                f"no memory for a message with {size} bytes of tensors: {why_no_memory(error)}; "
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
