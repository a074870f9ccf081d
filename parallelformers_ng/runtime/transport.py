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
from parallelformers_ng.runtime.frames import FIXED_SIZE, Flag, Frame, Kind, Packed, map_memfd, pack, read_fixed_part
from parallelformers_ng.runtime.leaves import MAX_DESCRIPTORS

FOREVER = float("inf")  # the deadline of a wait that ends only with the other process

_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
_LONGEST_POLL = 3600.0  # seconds; poll takes its time-out as an int of milliseconds


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
        self._fixed = bytearray(FIXED_SIZE)
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
        kind, flags, sequence, header_size, tensor_size = read_fixed_part(self._fixed, len(fds))
        header = bytearray(header_size)
        self._fill(memoryview(header), deadline, None)
        if flags & Flag.MEMFD:
            blob = map_memfd(fds[-1], tensor_size)
            os.close(fds.pop())
        elif tensor_size:
            blob = torch.empty(tensor_size, dtype=torch.uint8)  # torch's own memory is aligned; some kernels rely on it
            self._fill(memoryview(blob.numpy()), deadline, None)
        else:
            blob = _NO_TENSORS
        self.in_transit = False
        return Frame(kind, flags, sequence, bytes(header), blob, fds)

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
