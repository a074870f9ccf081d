"""Frames over one end of an inherited socket pair, and tensors in anonymous memory that travels with them.

    fixed part | header (JSON, padded to 64 bytes) | tensor bytes, up to 64 KiB      [+ file descriptors, SCM_RIGHTS]

Larger tensors are written once into a sealed memfd, which goes to any number of receivers as a file descriptor; each
maps it privately, so nothing is copied, nobody sees another's writes, and nothing ever has a name in /dev/shm.
"""

from __future__ import annotations

import array
import enum
import errno
import fcntl
import os
import select
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.errors import (
    ChannelClosedError,
    ProtocolError,
    RequestTimeoutError,
    SharedMemoryError,
)
from parallelformers_ng.runtime.decoder import Restore, decode
from parallelformers_ng.runtime.encoder import Encoded, Replace, encode
from parallelformers_ng.runtime.leaves import MAX_DESCRIPTORS, MAX_HEADER_BYTES, MAX_TENSOR_BYTES, aligned

INLINE_TENSOR_BYTES = 64 << 10
FOREVER = float("inf")  # the deadline of a wait that ends only with the other process

_MAGIC = b"pfng"
_VERSION = 1
_FIXED = struct.Struct("<4sBBHQIQI")  # magic, version, kind, flags, sequence, header and tensor bytes, descriptors
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_LONGEST_POLL = 3600.0  # seconds; poll takes its time-out as an int of milliseconds


class Kind(enum.IntEnum):
    """What a frame is for."""

    REQUEST = 1
    RESULT = 2
    ERROR = 3
    EVENT = 4
    READY = 5
    GOODBYE = 6


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
        """The value of the frame, which now owns the descriptors. Raises what `messages.decode` raises."""
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
    header = encoded.header.ljust(aligned(len(encoded.header)))
    fds, memfd = encoded.fds, None
    if len(fds) >= MAX_DESCRIPTORS:
        raise ProtocolError(f"{len(fds)} file descriptors in one message; the limit is {MAX_DESCRIPTORS - 1}")
    body = header
    if encoded.size > INLINE_TENSOR_BYTES:
        memfd = _write_memfd(encoded)
        fds, flags = [*fds, memfd], flags | Flag.MEMFD
    elif encoded.size:
        rows = (tensor.numpy().tobytes() for tensor in encoded.tensors)
        body += b"".join(row.ljust(aligned(len(row)), b"\0") for row in rows)
    fixed = _FIXED.pack(_MAGIC, _VERSION, kind, flags, sequence, len(header), encoded.size, len(fds))
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
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise SharedMemoryError(
                f"no memory for a message with {encoded.size} bytes of tensors: {error.strerror}; "
                "send smaller batches, or raise the memory limit of the container"
            ) from error
        raise
    return fd


def _map_memfd(fd: int, size: int) -> torch.Tensor:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        length = os.fstat(fd).st_size
    except OSError as error:
        raise ProtocolError(f"the tensors came in a file that is no memfd: {error}") from error
    if seals & _SEALS != _SEALS or length < size or not size:
        raise ProtocolError(f"a memfd of {length} bytes with seals {seals:#x} cannot hold {size} bytes for good")
    # Unlike mmap.mmap, this keeps no descriptor open for as long as the tensors live.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=size, dtype=torch.uint8)


class Channel:
    """One end of a control channel. Not for two threads at once.

    Args:
        connection: one end of an AF_UNIX stream pair. It becomes non-blocking.
        key: signs and checks pickles and class names; None until both sides have one.
        replace: see `messages.encode`.
        restore: see `messages.decode`.

    Attributes:
        in_transit: true while a frame is partly sent or received. If that stays so after an exception, the stream
            cannot be used again.
        sent: the sequence number of the last frame that was sent whole.
    """

    def __init__(
        self,
        connection: socket.socket,
        key: bytes | None = None,
        replace: Replace | None = None,
        restore: Restore | None = None,
    ) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.key = key
        self.replace = replace
        self.restore = restore
        self.in_transit = False
        self.sent = -1
        self._fixed = bytearray(_FIXED.size)
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor of the socket, for poll."""
        return self.connection.fileno()

    def close(self) -> None:
        """Close the socket in this process."""
        self.connection.close()

    def send(self, kind: Kind, sequence: int, obj: Any, deadline: float = FOREVER, flags: int = 0) -> None:
        """Encode a value and send it.

        Args:
            kind: what the frame is for.
            sequence: the request it belongs to.
            obj: any value that the codec takes.
            deadline: on the clock of `time.monotonic`, in seconds.
            flags: see `Flag`.

        Raises:
            NotPortableError, SharedMemoryError: see `encode` and `pack`; nothing was sent.
            ChannelClosedError: the other end is gone.
            RequestTimeoutError: the other end did not read until the deadline.
        """
        packed = pack(kind, sequence, encode(obj, self.key, self.replace), flags)
        try:
            self.send_packed(packed, deadline)
        finally:
            packed.close()

    def send_packed(self, packed: Packed, deadline: float = FOREVER) -> None:
        """Send a frame. Raises what `send` raises, except for the errors of encoding."""
        self.in_transit = True
        rest = memoryview(packed.data)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", packed.fds))] if packed.fds else []
        while rest:
            try:
                count = self.connection.sendmsg([rest], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                writable = select.poll()
                writable.register(self.connection, select.POLLOUT)
                _wait(writable, deadline, "read a message")
            except OSError as error:
                raise ChannelClosedError(f"a message could not be sent: {error.strerror}") from error
            else:
                rest, rights = rest[count:], []
        self.sent = packed.sequence
        self.in_transit = False

    def recv(self, deadline: float = FOREVER) -> tuple[Kind, int, Any]:
        """Receive one frame and decode it: kind, sequence, value. Raises what `receive` and `decode` raise."""
        frame = self.receive(deadline)
        return frame.kind, frame.sequence, self.decode(frame)

    def decode(self, frame: Frame) -> Any:
        """The value of a frame. Raises ProtocolError and NotPortableError, see `messages.decode`."""
        return frame.decode(self.key, self.restore)

    def receive(self, deadline: float = FOREVER) -> Frame:
        """Receive one frame, undecoded.

        Raises:
            ChannelClosedError: the other end is gone.
            ProtocolError: the bytes are no frame, or announce more than the limits allow.
            RequestTimeoutError: no whole frame came before the deadline.
        """
        fds: list[int] = []
        try:
            self._fill(memoryview(self._fixed), deadline, fds)
            return self._finish(deadline, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def _finish(self, deadline: float, fds: list[int]) -> Frame:
        magic, version, kind, flags, sequence, header_size, tensor_size, count = _FIXED.unpack(self._fixed)
        if magic != _MAGIC or version != _VERSION or kind not in _KINDS or flags & ~_ALL_FLAGS:
            raise ProtocolError(f"no frame of this version: {bytes(self._fixed).hex()}")
        shared = bool(flags & Flag.MEMFD)
        if header_size > MAX_HEADER_BYTES or tensor_size > (MAX_TENSOR_BYTES if shared else INLINE_TENSOR_BYTES):
            raise ProtocolError(f"a frame announces {header_size} + {tensor_size} bytes, beyond the limits")
        if count != len(fds) or (shared and not fds):
            raise ProtocolError(f"a frame announces {count} file descriptors, {len(fds)} came")
        header = bytearray(header_size)
        self._fill(memoryview(header), deadline, None)
        if shared:
            blob = _map_memfd(fds[-1], tensor_size)
            os.close(fds.pop())
        elif tensor_size:
            blob = torch.empty(tensor_size, dtype=torch.uint8)  # torch's own memory is aligned; some kernels rely on it
            self._fill(memoryview(blob.numpy()), deadline, None)
        else:
            blob = _NO_TENSORS
        self.in_transit = False
        return Frame(_KINDS[kind], flags, sequence, bytes(header), blob, fds)

    def _fill(self, rest: memoryview, deadline: float, fds: list[int] | None) -> None:
        while rest:
            try:
                count = self.connection.recv_into(rest) if fds is None else self._fill_with_descriptors(rest, fds)
            except BlockingIOError:
                _wait(self._readable, deadline, "answer")
                continue
            except OSError as error:
                raise ChannelClosedError(f"a message could not be received: {error.strerror}") from error
            if not count:
                raise ChannelClosedError("the process at the other end is gone")
            self.in_transit = True
            rest = rest[count:]

    def _fill_with_descriptors(self, rest: memoryview, fds: list[int]) -> int:
        count, rights, flags, _ = self.connection.recvmsg_into([rest], _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                fds.extend(received)
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError("more file descriptors came than one frame may carry, or than this process may open")
        return count


_NO_TENSORS = torch.empty(0, dtype=torch.uint8)


def _wait(poll: select.poll, deadline: float, what: str) -> None:
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise RequestTimeoutError(f"the process at the other end did not {what} before the deadline")
    poll.poll(None if rest == FOREVER else min(rest, _LONGEST_POLL) * 1000)
