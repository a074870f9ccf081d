"""Sends and receives frames over one end of an inherited socket pair."""

from __future__ import annotations

import array
import math
import os
import select
import socket
import time
from typing import Any

from parallelformers_ng.errors import ChannelClosedError, ProtocolError, RequestTimeoutError
from parallelformers_ng.wire.frame import (
    FIXED_PART,
    MAX_DESCRIPTORS,
    Flag,
    Frame,
    FrameKind,
    Packed,
    close_all,
    map_memfd,
    own_copy,
    read_fixed_part,
)
from parallelformers_ng.wire.message import decode, encode, pack

SPIN_SECONDS = 300e-6
"""Seconds for which a process polls for a frame before it sleeps. Waking up takes a core 50 µs, and afterwards the core
is as slow as with code that it never ran."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_LONGEST_POLL = 3600.0  # seconds; a longer wait could exceed `poll`'s limit, an int of milliseconds
_READ_AHEAD_BYTES = 32 << 10  # bytes per system call, enough for a small frame
# Plain ints, because operators of enum.IntFlag take microseconds.
_NO_SIGNAL, _CLOSE_ON_EXEC, _TRUNCATED = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_AT_ONCE = int(socket.MSG_DONTWAIT)


class Channel:
    """One end of a control channel. Two threads must not use a channel at the same time.

    If a wait ends at its deadline, no received bytes are lost: the next `receive` continues the same frame.

    Args:
        connection: one end of an AF_UNIX stream pair.
        blocking: whether all waits are without a deadline, which saves system calls.
    """

    _sends_apart = True

    def __init__(self, connection: socket.socket, blocking: bool = False) -> None:
        connection.setblocking(blocking)
        self.connection = connection
        self._ahead = bytearray(_READ_AHEAD_BYTES)
        self._free = memoryview(self._ahead)
        self._begin = self._end = 0  # bounds of the bytes in `_ahead` that no call has returned yet
        self._fds: list[int] = []  # received descriptors that no call has returned yet, in order
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def has_more(self) -> bool:
        """Whether the next frame, or a part of it, was already read into the buffer, where poll does not see it."""
        return self._end > self._begin

    def spin(self, until: float) -> bool:
        """Poll for a frame without sleeping, until a time of `time.monotonic`; between polls, other processes may run.
        Return whether a frame, or a part of it, has arrived."""
        while self._end == self._begin and not self._read_ahead(_AT_ONCE):
            if time.monotonic() >= until:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        """Close the socket in this process, and the received file descriptors of frames that nobody received."""
        self.connection.close()
        close_all(self._fds)

    def send(self, kind: FrameKind, sequence: int, obj: Any, deadline: float = math.inf, place: str = "") -> None:
        """Encode a value and send it; `place` is the value's name in error messages."""
        packed = pack(kind, sequence, encode(obj, place), apart=kind is FrameKind.RESULT and self._sends_apart)
        try:
            self.send_packed(packed, deadline)
        finally:
            packed.close()

    def send_packed(self, packed: Packed, deadline: float = math.inf) -> None:
        self._send(packed.data, packed.fds, deadline)

    def _send(self, rest: bytes | memoryview, fds: list[int], deadline: float) -> None:
        while rest:
            try:
                if fds:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    count = self.connection.sendmsg([rest], rights, _NO_SIGNAL)
                else:
                    count = self.connection.send(rest, _NO_SIGNAL)
            except BlockingIOError:
                writable = select.poll()
                writable.register(self.connection, select.POLLOUT)
                wait(writable, deadline, "the process at the other end did not read a message before the deadline")
            except OSError as error:
                raise ChannelClosedError(f"a message could not be sent: {error.strerror}") from error
            else:
                rest, fds = memoryview(rest)[count:], []

    def recv(self, deadline: float = math.inf) -> tuple[FrameKind, int, Any]:
        """Receive and decode one frame; return its kind, sequence and value."""
        frame = self.receive(deadline)
        return frame.kind, frame.sequence, decode(frame)

    def receive(self, deadline: float = math.inf) -> Frame:
        try:
            self._fill(FIXED_PART.size, deadline)
            kind, flags, sequence, variable, outside, count = read_fixed_part(self._ahead, self._begin, len(self._fds))
            shared = flags & Flag.MEMFD
            size = FIXED_PART.size + (0 if shared else variable)
            self._fill(size, deadline)
            # The frame has arrived as a whole, so the code below does not wait.
            if shared:
                body = map_memfd(self._fds[count - 1], variable)
            else:
                body = own_copy(self._free[self._begin + FIXED_PART.size : self._begin + size], outside)
            more = len(self._fds) - count
            if more and self._end == self._begin + size:
                raise ProtocolError(f"{more} more file descriptors came with a frame than the frame announces")
        except ProtocolError:
            close_all(self._fds)
            raise
        self._begin += size
        fds, self._fds = self._fds[:count], self._fds[count:]
        if shared:
            os.close(fds.pop())
        return Frame(kind, flags, sequence, body, outside, fds)

    def _fill(self, size: int, deadline: float) -> None:
        while self._end - self._begin < size:
            if size > len(self._ahead):
                self._resize(size)
            if not self._read_ahead():
                wait(self._readable, deadline, "the process at the other end did not answer before the deadline")

    def _resize(self, size: int) -> None:
        rest = self._free[self._begin : self._end]
        self._ahead = bytearray(size)
        self._free = memoryview(self._ahead)
        self._free[: len(rest)] = rest
        self._begin, self._end = 0, len(rest)

    def _read_ahead(self, receive_flags: int = 0) -> bool:
        """Receive the available bytes and descriptors. Return False if there are none and the socket does not wait."""
        if self._begin:
            if self._end == self._begin and len(self._ahead) > _READ_AHEAD_BYTES:
                self._resize(_READ_AHEAD_BYTES)  # gives back the memory of a long frame
            rest = self._end - self._begin
            if rest:
                self._ahead[:rest] = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, rest
        free = self._free[self._end :] if self._end else self._free
        try:
            receive_flags |= _CLOSE_ON_EXEC
            count, rights, flags, _ = self.connection.recvmsg_into([free], _ANCILLARY_BYTES, receive_flags)
        except BlockingIOError:
            return False
        except OSError as error:
            raise ChannelClosedError(f"a message could not be received: {error.strerror}") from error
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self._fds.extend(received)
        if flags & _TRUNCATED:
            raise ProtocolError("more file descriptors came than one frame may have, or than this process may open")
        if not count:
            raise ChannelClosedError("the process at the other end is gone")
        self._end += count
        return True


def wait(poll: select.poll, deadline: float, late: str) -> list[int]:
    """Wait until a watched descriptor is ready, but at most an hour, and return the ready descriptors. Raise
    RequestTimeoutError with the text `late` after the deadline."""
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise RequestTimeoutError(late)
    return [fd for fd, _ in poll.poll(None if rest == math.inf else min(rest, _LONGEST_POLL) * 1000)]
