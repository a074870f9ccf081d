"""Frames over one end of an inherited socket pair."""

from __future__ import annotations

import array
import os
import select
import socket
import time
from typing import Any

import torch

from parallelformers_ng.errors import ChannelClosedError, ProtocolError, RequestTimeoutError
from parallelformers_ng.runtime.decoder import Restore
from parallelformers_ng.runtime.encoder import Replace, encode
from parallelformers_ng.runtime.frames import (
    FIXED_SIZE,
    FixedPart,
    Flag,
    Frame,
    Kind,
    Packed,
    map_memfd,
    pack,
    read_fixed_part,
)
from parallelformers_ng.runtime.leaves import MAX_DESCRIPTORS

FOREVER = float("inf")  # the deadline of a wait that ends only with the other process
LOOKOUT_SECONDS = 300e-6
"""How long a process looks out for what is about to come before it sleeps. To wake up takes a core 50 µs, and then it
is as slow as with code that it never ran."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_NO_ANSWER = "the process at the other end did not answer before the deadline"
_LONGEST_POLL = 3600.0  # seconds; poll takes its time-out as an int of milliseconds
_READ_AHEAD_BYTES = 32 << 10  # so that one system call brings a whole small frame
# Plain ints: the operators of enum.IntFlag take microseconds.
_NO_SIGNAL, _CLOSE_ON_EXEC, _TRUNCATED = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)


class Channel:
    """One end of a control channel. Not for two threads at once.

    Args:
        connection: one end of an AF_UNIX stream pair.
        key: signs and checks pickles and class names; None until both sides have one.
        replace: see `encoder.encode`.
        restore: see `decoder.decode`.
        patient: all waits are without a deadline, which saves system calls.

    Attributes:
        in_transit: true while a frame is partly sent or taken. If that stays so after an exception, the stream
            cannot be used again.
        sent: the sequence number of the last frame that was sent whole.
    """

    def __init__(
        self,
        connection: socket.socket,
        key: bytes | None = None,
        replace: Replace | None = None,
        restore: Restore | None = None,
        patient: bool = False,
    ) -> None:
        connection.setblocking(patient)
        self.connection = connection
        self.key = key
        self.replace = replace
        self.restore = restore
        self.in_transit = False
        self.sent = -1
        self._ahead = bytearray(_READ_AHEAD_BYTES)
        self._free = memoryview(self._ahead)
        self._begin = self._end = 0  # of what was read ahead and is not taken yet
        self._fds: list[int] = []  # that came with it, in the order of their frames
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor of the socket, for poll."""
        return self.connection.fileno()

    @property
    def has_more(self) -> bool:
        """True where the next frame, or a part of it, was read ahead: poll need not tell of it."""
        return self._end > self._begin

    def look_out(self) -> None:
        """Return once something can be received, at the latest after LOOKOUT_SECONDS."""
        if not self.has_more:
            look_out(self._readable, time.monotonic() + LOOKOUT_SECONDS)

    def close(self) -> None:
        """Close the socket in this process."""
        self.connection.close()
        self._close_descriptors()

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
                count = self.connection.sendmsg([rest], rights, _NO_SIGNAL)
            except BlockingIOError:
                writable = select.poll()
                writable.register(self.connection, select.POLLOUT)
                wait(writable, deadline, "the process at the other end did not read a message before the deadline")
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
        """The value of a frame. Raises ProtocolError and NotPortableError, see `decoder.decode`."""
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
            while self._end - self._begin < FIXED_SIZE:
                self._read_ahead(deadline)
            self.in_transit = True
            part = read_fixed_part(self._ahead, self._begin, len(self._fds))
            self._begin += FIXED_SIZE
            fds, self._fds = self._fds[: part.descriptors], self._fds[part.descriptors :]
            header = self._take(part.header_size, deadline)
            blob = self._take_tensors(part, fds, deadline)
            if self._fds and not self.has_more:
                raise ProtocolError(f"{len(self._fds)} more file descriptors came than a frame announces")
        except BaseException:
            for fd in fds:
                os.close(fd)
            self._close_descriptors()
            raise
        self.in_transit = False
        return Frame(part.kind, part.flags, part.sequence, header, blob, fds)

    def _take_tensors(self, part: FixedPart, fds: list[int], deadline: float) -> torch.Tensor:
        if part.flags & Flag.MEMFD:
            blob = map_memfd(fds[-1], part.tensor_size)
            os.close(fds.pop())
            return blob
        if not part.tensor_size:
            return _NO_TENSORS
        blob = torch.empty(
            part.tensor_size, dtype=torch.uint8
        )  # torch's own memory is aligned; some kernels rely on it
        self._take_into(memoryview(blob.numpy()), deadline)
        return blob

    def _take(self, size: int, deadline: float) -> bytes:
        if size <= self._end - self._begin:
            taken = bytes(self._ahead[self._begin : self._begin + size])
            self._begin += size
            return taken
        buffer = bytearray(size)
        self._take_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def _take_into(self, rest: memoryview, deadline: float) -> None:
        """Fill `rest` with what was read ahead, then from the socket: never more than belongs to this frame."""
        count = min(len(rest), self._end - self._begin)
        rest[:count] = self._ahead[self._begin : self._begin + count]
        self._begin += count
        rest = rest[count:]
        while rest:
            try:
                count = self.connection.recv_into(rest)
            except BlockingIOError:
                wait(self._readable, deadline, _NO_ANSWER)
                continue
            except OSError as error:
                raise _closed(error) from error
            if not count:
                raise ChannelClosedError("the process at the other end is gone")
            rest = rest[count:]

    def _read_ahead(self, deadline: float) -> None:
        if self._begin:
            rest = self._end - self._begin
            if rest:
                self._ahead[:rest] = self._ahead[self._begin : self._end]
            self._begin, self._end = 0, rest
        free = self._free[self._end :] if self._end else self._free
        while True:
            try:
                count, rights, flags, _ = self.connection.recvmsg_into([free], _ANCILLARY_BYTES, _CLOSE_ON_EXEC)
                break
            except BlockingIOError:
                wait(self._readable, deadline, _NO_ANSWER)
            except OSError as error:
                raise _closed(error) from error
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

    def _close_descriptors(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []


_NO_TENSORS = torch.empty(0, dtype=torch.uint8)


def _closed(error: OSError) -> ChannelClosedError:
    return ChannelClosedError(f"a message could not be received: {error.strerror}")


def look_out(poll: select.poll, until: float) -> list[tuple[int, int]]:
    """Look again and again what a poll watches, and give way to other processes in between.

    Args:
        until: on the clock of `time.monotonic`, in seconds.

    Returns:
        What `poll.poll` returns; nothing if the time passed.
    """
    while not (found := poll.poll(0)) and time.monotonic() < until:
        os.sched_yield()
    return found


def wait(poll: select.poll, deadline: float, late: str, look_until: float = 0.0) -> list[int]:
    """Wait for what a poll watches. Returns the descriptors that are ready; none after an hour without any.

    Args:
        deadline: on the clock of `time.monotonic`, in seconds.
        late: what the error says.
        look_until: when to stop looking out and sleep, on the same clock.

    Raises:
        RequestTimeoutError: the deadline had passed already.
    """
    rest = deadline - time.monotonic()
    if rest <= 0:
        raise RequestTimeoutError(late)
    found = look_out(poll, min(look_until, deadline)) if look_until else []
    return [fd for fd, _ in found or poll.poll(None if rest == FOREVER else min(rest, _LONGEST_POLL) * 1000)]
