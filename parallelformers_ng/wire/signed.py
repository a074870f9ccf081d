"""Sends frames between hosts over TCP in signed records; the receiver checks a signature before it reads any content.

A record:

    size of the body | signature | body | signature

Both signatures include a count of the earlier signatures in the same direction. The keys are valid for one connection
(`meeting.py`). A record that was changed, repeated, left out, cut short, or sent back to its sender ends the
connection. Records are not encrypted.

The body is a frame (`frame.py`), then the contents of the frame's files, then the sizes of the files. Between hosts,
files are sent as bytes, not as descriptors.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import mmap
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallelformers_ng.errors import ProtocolError
from parallelformers_ng.wire.frame import FIXED_PART, MAX_BYTES, Flag, Frame, Packed, own_copy, read_fixed_part
from parallelformers_ng.wire.transport import Channel

SIZE = struct.Struct("<Q")
SIGNATURE_BYTES = 32
HEAD_BYTES = SIZE.size + SIGNATURE_BYTES


def signature(key: bytes, purpose: str, data: bytes) -> bytes:
    """Return the HMAC-SHA256 (RFC 2104), 32 bytes, of `data`; it is valid only for the same `purpose`."""
    return hmac.digest(key, purpose.encode() + b"\0" + data, "sha256")


@dataclass(frozen=True)
class Session:
    """The two keys of one end of a connection: one signs records to send, one checks received records."""

    sending: bytes
    receiving: bytes


class Signer:
    """Signs data in one direction of a connection, or checks the signatures of received data."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def sign(self, *parts: bytes | bytearray | memoryview) -> bytes:
        """Return the next signature, 32 bytes: the HMAC-SHA256 of a running number and the parts."""
        signature = hmac.new(self._key, SIZE.pack(self._count), "sha256")
        for part in parts:
            signature.update(part)
        self._count += 1
        return signature.digest()

    def check(self, signature: bytes | bytearray | memoryview, *parts: bytes | bytearray | memoryview) -> None:
        """Raise ProtocolError if `signature` is not the next signature of the parts."""
        if not hmac.compare_digest(self.sign(*parts), bytes(signature)):
            raise ProtocolError("a record from the network has a wrong signature, so the record was not read")


class SignedChannel(Channel):
    """A control channel between hosts. Both ends sign all records; a wrong signature raises ProtocolError.

    An open file of a message is sent as its content. The receiver gets a new file in memory with that content. The
    errors are those of `Channel`, and OSError if this process cannot read or open a file.
    """

    _sends_apart = False

    def __init__(self, connection: socket.socket, session: Session, blocking: bool = False) -> None:
        super().__init__(connection, blocking)
        self._sending, self._receiving = Signer(session.sending), Signer(session.receiving)
        self._due = -1  # size of the record whose body must be received next; -1 before the size is known

    def send_packed(self, packed: Packed, deadline: float = math.inf) -> None:
        self._send(self._record(packed), [], deadline)

    def receive(self, deadline: float = math.inf) -> Frame:
        if self._due < 0:
            self._fill(HEAD_BYTES, deadline)
            head = self._free[self._begin : self._begin + HEAD_BYTES]
            self._receiving.check(head[SIZE.size :], head[: SIZE.size])
            self._begin += HEAD_BYTES
            (self._due,) = SIZE.unpack(head[: SIZE.size])
        if not FIXED_PART.size <= self._due <= MAX_BYTES:
            raise ProtocolError(f"a record announces {self._due} bytes, beyond the limits")
        self._fill(self._due + SIGNATURE_BYTES, deadline)
        end = self._begin + self._due
        body = self._free[self._begin : end]
        self._receiving.check(self._free[end : end + SIGNATURE_BYTES], body)
        self._begin, self._due = end + SIGNATURE_BYTES, -1
        return _frame(body)

    def _record(self, packed: Packed) -> bytes:
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(_content(fd)) for fd in packed.fds]
            sizes = [SIZE.pack(len(file)) for file in files]
            body = b"".join([packed.data, *files, *sizes])
        size = SIZE.pack(len(body))
        return b"".join([size, self._sending.sign(size), body, self._sending.sign(body)])


@contextlib.contextmanager
def _content(fd: int) -> Iterator[mmap.mmap | bytes]:
    if not os.fstat(fd).st_size:
        yield b""
        return
    with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as mapping:
        yield mapping


def _frame(body: memoryview) -> Frame:
    """Return the frame in the body of a checked record. The frame's files become new files of this process."""
    count = FIXED_PART.unpack_from(body)[-1]
    sizes_at = len(body) - count * SIZE.size
    if sizes_at < FIXED_PART.size:
        raise ProtocolError(f"a record of {len(body)} bytes announces {count} files, which do not fit")
    sizes = [size for (size,) in SIZE.iter_unpack(body[sizes_at:])]
    kind, flags, sequence, size, outside, _ = read_fixed_part(bytes(body[: FIXED_PART.size]), 0, count)
    shared = flags & Flag.MEMFD
    begin = FIXED_PART.size + (0 if shared else size)
    if begin + sum(sizes) != sizes_at or (shared and size > sizes[-1]):
        raise ProtocolError(f"a record of {len(body)} bytes announces files of other sizes than it contains")
    content = body[FIXED_PART.size : begin]
    files: list[memoryview] = []
    for file_size in sizes:
        files.append(body[begin : begin + file_size])
        begin += file_size
    if shared:
        content = files.pop()[:size]
    return Frame(kind, flags, sequence, own_copy(content, outside), outside, _as_descriptors(files))


def _as_descriptors(contents: Sequence[memoryview]) -> list[int]:
    descriptors: list[int] = []
    try:
        for content in contents:
            descriptors.append(os.memfd_create("parallelformers_ng", os.MFD_CLOEXEC))
            while content:
                content = content[os.write(descriptors[-1], content) :]
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    return descriptors
