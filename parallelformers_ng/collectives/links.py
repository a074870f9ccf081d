"""One rank of each host, connected to those of the other hosts: what each of them holds, to all of them.

Every link is a TCP connection whose ends have proven that they know the group's key (`wire/meeting.py`), and carries
records, each with two signatures:

    generation, step, size of the body | signature | body | signature
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.errors import CollectiveAbortedError, DivergedError, ProtocolError
from parallelformers_ng.wire.signed import SIGNATURE_BYTES, Session, Signer
from parallelformers_ng.wire.transport import SPIN_SECONDS

_HEAD = struct.Struct("<QQQ")
_HEAD_BYTES = _HEAD.size + SIGNATURE_BYTES
_WATCH_SECONDS = 0.02  # between two looks at the abort word, asleep

Buffer = bytes | bytearray | memoryview


class _Link:
    """A connection to the leader of another host. It may be left in the middle of a record, and taken up again."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._sending, self._receiving = Signer(session.sending), Signer(session.receiving)
        self._unsent: list[memoryview] = []
        self._coming = memoryview(bytearray(_HEAD_BYTES))
        self._have = 0
        self._head: tuple[int, int, int] | None = None  # of the record whose body is coming

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, generation: int, step: int, body: Buffer) -> None:
        """Add a record to what is to be sent. Until it is, `body` must not change."""
        head = _HEAD.pack(generation, step, len(body))
        parts = (head, self._sending.sign(head), body, self._sending.sign(body))
        self._unsent += [memoryview(part) for part in parts]

    def send(self) -> None:
        """Send what the connection takes now."""
        while self._unsent:
            try:
                count = self.connection.sendmsg(self._unsent, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            while self._unsent and count >= len(self._unsent[0]):
                count -= len(self._unsent.pop(0))
            if count:
                self._unsent[0] = self._unsent[0][count:]

    def keep_unsent(self) -> None:
        """Have what is not sent yet outlive the tensor that it lies in."""
        self._unsent = [memoryview(bytes(part)) for part in self._unsent]

    def take(self, generation: int, step: int, size: int) -> memoryview | None:
        """Return the body of the record that is due, once it has come whole; records of earlier generations are
        dropped.

        Raises:
            DivergedError: another record came.
            ProtocolError: a record has a wrong signature.
        """
        while self._fill():
            text = self._coming[:-SIGNATURE_BYTES]
            self._receiving.check(self._coming[-SIGNATURE_BYTES:], text)
            if self._head is None:
                self._head = came = _HEAD.unpack(text)
                self._expect(came[2] + SIGNATURE_BYTES)
                if came[0] >= generation and came != (generation, step, size):
                    raise DivergedError(f"step {step} of {size} bytes was due, and step {came[1]} of {came[2]} came")
                continue
            head, self._head = self._head, None
            self._expect(_HEAD_BYTES)
            if head[0] == generation:
                return text
        return None

    def _expect(self, size: int) -> None:
        self._coming, self._have = memoryview(bytearray(size)), 0

    def _fill(self) -> bool:
        """Receive what has come. Returns whether all that is expected is there."""
        while self._have < len(self._coming):
            try:
                count = self.connection.recv_into(self._coming[self._have :])
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionError("it is gone")
            self._have += count
        return True


class Links:
    """A leader's connections to those of the other hosts.

    Args:
        host: number of this host.
        connections: number of each other host → the connection to its leader, and its keys.
        arena: arena of this host, with the abort word.
        timeout: how long to wait for another leader, in seconds.
    """

    def __init__(
        self, host: int, connections: Mapping[int, tuple[socket.socket, Session]], arena: Arena, timeout: float
    ) -> None:
        self._host = host
        self._links = {other: _Link(*connection) for other, connection in connections.items()}
        self._arena = arena
        self._timeout = timeout
        self._generation = self._step = 0

    def exchange(self, own: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        """Exchange the values of the leaders of all hosts; return them in the order of the hosts.

        Args:
            own: value of this host.
            sizes: bytes of each; those of a host that contributes nothing do not travel.

        Raises:
            CollectiveAbortedError: somebody aborted, or a leader is gone, or did not come within the timeout.
            DivergedError: a leader is in another collective.
        """
        self._step += 1
        received: list[Buffer | None] = [None if size else b"" for size in sizes]
        received[self._host] = own
        missing = {other: link for other, link in self._links.items() if received[other] is None}
        sending = list(self._links.values())
        other = -1
        try:
            if len(own):
                for link in sending:
                    link.put(self._generation, self._step, own)
            start = time.monotonic()
            while True:
                for other, link in self._links.items():
                    link.send()
                    if other in missing and (body := link.take(self._generation, self._step, sizes[other])) is not None:
                        received[other] = body
                        del missing[other]
                if not missing and not any(link.has_unsent for link in sending):
                    break  # before the next wait, which nothing would end
                self._wait(start, missing)
        except (OSError, ProtocolError) as error:
            raise CollectiveAbortedError(f"host {self._host}: the connection to host {other} broke: {error}") from error
        finally:
            for link in sending:
                link.keep_unsent()
        return [part for part in received if part is not None]

    def reset(self) -> None:
        """Begin anew after an abort. Every leader does; what is still under way of before is dropped."""
        self._generation += 1
        self._step = 0

    def close(self) -> None:
        """Hang up. Idempotent."""
        for link in self._links.values():
            link.connection.close()

    def _wait(self, start: float, missing: Mapping[int, _Link]) -> None:
        if self._arena.aborted:
            raise self._arena.abort_error()
        waited = time.monotonic() - start
        if waited > self._timeout:
            raise CollectiveAbortedError(
                f"host {self._host}: hosts {sorted(missing)} did not come within {self._timeout:g} s"
            )
        if waited < SPIN_SECONDS:
            os.sched_yield()
            return
        poll = select.poll()
        for other, link in self._links.items():
            wanted = (select.POLLIN if other in missing else 0) | (select.POLLOUT if link.has_unsent else 0)
            if wanted:
                poll.register(link.connection, wanted)
        poll.poll(_WATCH_SECONDS * 1000)
