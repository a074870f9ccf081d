"""Frames over one end of an inherited socket pair."""

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
    FixedPart,
    Flag,
    Frame,
    FrameKind,
    Packed,
    map_memfd,
    own_copy,
)
from parallelformers_ng.wire.message import decode, encode, pack

SPIN_SECONDS = 300e-6
"""How long a process polls for what is about to come before it sleeps. To wake up takes a core 50 µs, and then it is as
slow as with code that it never ran."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_LONGEST_POLL = 3600.0  # seconds; poll takes its time-out as an int of milliseconds
_READ_AHEAD_BYTES = 32 << 10  # so that one system call brings a whole small frame
# Plain ints: the operators of enum.IntFlag take microseconds.
_NO_SIGNAL, _CLOSE_ON_EXEC, _TRUNCATED = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_AT_ONCE = int(socket.MSG_DONTWAIT)


class Channel:
    """One end of a control channel. Not for two threads at once.

    Args:
        connection: one end of an AF_UNIX stream pair.
        blocking: all waits are without a deadline, which saves system calls.

    If a wait ends at its deadline, nothing that came is lost: the next `receive` takes the frame whose first part had
    come.
    """

    def __init__(self, connection: socket.socket, blocking: bool = False) -> None:
        connection.setblocking(blocking)
        self.connection = connection
        self._ahead = bytearray(_READ_AHEAD_BYTES)
        self._free = memoryview(self._ahead)
        self._begin = self._end = 0  # of what was read ahead and is not taken yet
        self._fds: list[int] = []  # that came with it, in the order of their frames
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """Return the descriptor of the socket, for poll."""
        return self.connection.fileno()

    @property
    def has_more(self) -> bool:
        """True if the next frame, or a part of it, was read ahead: poll need not tell of it."""
        return self._end > self._begin

    def spin(self, until: float) -> bool:
        """Poll for a frame without sleeping, and give way to other processes in between.

        Args:
            until: on the clock of `time.monotonic`, in seconds.

        Returns:
            Whether a frame, or a part of it, has come and was read ahead. Raises what `receive` raises.
        """
        while self._end == self._begin and not self._read_ahead(_AT_ONCE):
            if time.monotonic() >= until:
                return False
            os.sched_yield()
        return True

    def close(self) -> None:
        """Close the socket in this process."""
        self.connection.close()
        self._close_descriptors()

    def send(self, kind: FrameKind, sequence: int, obj: Any, deadline: float = math.inf, place: str = "") -> None:
        """Encode a value and send it.

        Args:
            kind: purpose of the frame.
            sequence: the request it belongs to.
            obj: any value that `encode` takes.
            deadline: on the clock of `time.monotonic`, in seconds.
            place: see `encode`.

        Raises:
            NotPortableError, SharedMemoryError: see `encode` and `pack`; nothing was sent.
            ChannelClosedError: the other end is gone.
            RequestTimeoutError: the other end did not read until the deadline.
        """
        packed = pack(kind, sequence, encode(obj, place))
        try:
            self.send_packed(packed, deadline)
        finally:
            packed.close()

    def send_packed(self, packed: Packed, deadline: float = math.inf) -> None:
        """Send a frame. Raises what `send` raises, except for the errors of encoding."""
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
        """Receive one frame and decode it: kind, sequence, value. Raises what `receive` and `decode` raise."""
        frame = self.receive(deadline)
        return frame.kind, frame.sequence, decode(frame)

    def receive(self, deadline: float = math.inf) -> Frame:
        """Receive one frame, undecoded.

        Raises:
            ChannelClosedError: the other end is gone.
            ProtocolError: the bytes are no frame, or announce more than the limits allow.
            RequestTimeoutError: no whole frame came before the deadline.
        """
        try:
            self._fill(FIXED_PART.size, deadline)
            fixed = FixedPart.read(self._ahead, self._begin, len(self._fds))
            shared = bool(fixed.flags & Flag.MEMFD)
            size = FIXED_PART.size + (0 if shared else fixed.size)
            self._fill(size, deadline)
            # Whole. From here on nothing waits.
            if shared:
                body = map_memfd(self._fds[fixed.descriptors - 1], fixed.size)
            else:
                body = own_copy(self._free[self._begin + FIXED_PART.size : self._begin + size], fixed.outside)
            if len(self._fds) > fixed.descriptors and self._end == self._begin + size:
                more = len(self._fds) - fixed.descriptors
                raise ProtocolError(f"{more} more file descriptors came than a frame announces")
        except ProtocolError:
            self._close_descriptors()
            raise
        self._begin += size
        fds, self._fds = self._fds[: fixed.descriptors], self._fds[fixed.descriptors :]
        if shared:
            os.close(fds.pop())
        return Frame(fixed.kind, fixed.flags, fixed.sequence, body, fixed.outside, fds)

    def _fill(self, size: int, deadline: float) -> None:
        """Read ahead until there are `size` bytes or more."""
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
        """Receive what there is. Returns False if nothing has come and neither the socket nor `receive_flags` waits."""
        if self._begin:
            if self._end == self._begin and len(self._ahead) > _READ_AHEAD_BYTES:
                self._resize(_READ_AHEAD_BYTES)  # after a long frame
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
            raise ProtocolError("more file descriptors came than one frame may carry, or than this process may open")
        if not count:
            raise ChannelClosedError("the process at the other end is gone")
        self._end += count
        return True

    def _close_descriptors(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def wait(poll: select.poll, deadline: float, late: str) -> list[int]:
    """Wait for what a poll watches. Returns the descriptors that are ready; none after an hour
    without any.

    Args:
        deadline: on the clock of `time.monotonic`, in seconds.
        late: text of the error.

    Raises:
        RequestTimeoutError: the deadline had passed already.
    """
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise RequestTimeoutError(late)
    return [fd for fd, _ in poll.poll(None if rest == math.inf else min(rest, _LONGEST_POLL) * 1000)]
