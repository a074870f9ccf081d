"""Exchanges data between the leaders of hosts; a leader is the first rank of a host.

Every link is a TCP connection. Both ends have proven that they know the group's key (`wire/meeting.py`). A link
transports records, each with two signatures:

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
_WATCH_SECONDS = 0.02  # a waiting leader looks for an abort this often

Buffer = bytes | bytearray | memoryview


class _Link:
    """A connection to the leader of another host, for records. No method waits: a later call sends or receives the rest
    of a record."""

    def __init__(self, connection: socket.socket, session: Session) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._sending, self._receiving = Signer(session.sending), Signer(session.receiving)
        self.unsent: list[memoryview] = []
        self._coming = memoryview(bytearray(_HEAD_BYTES))
        self._have = 0
        self._head: tuple[int, int, int] | None = None  # header of a record whose body has not arrived yet

    def put(self, generation: int, step: int, body: Buffer) -> None:
        """Queue a record. `body` must not change until the record is sent, or `Links.exchange` has copied the body."""
        head = _HEAD.pack(generation, step, len(body))
        parts = (head, self._sending.sign(head), body, self._sending.sign(body))
        self.unsent += [memoryview(part) for part in parts]

    def send(self) -> None:
        """Send as many queued bytes as the connection accepts without waiting."""
        while self.unsent:
            try:
                count = self.connection.sendmsg(self.unsent, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            while self.unsent and count >= len(self.unsent[0]):
                count -= len(self.unsent.pop(0))
            if count:
                self.unsent[0] = self.unsent[0][count:]

    def take(self, generation: int, step: int, size: int) -> memoryview | None:
        """Return the body of the record with this generation and step, or None if bytes are still missing.

        Records of an earlier generation, from before a reset, are dropped. Raises DivergedError for any other record.
        """
        while self._fill():
            text = self._coming[:-SIGNATURE_BYTES]
            self._receiving.check(self._coming[-SIGNATURE_BYTES:], text)
            if self._head is None:
                self._head = head = _HEAD.unpack(text)
                self._expect(head[2] + SIGNATURE_BYTES)
                if head[0] >= generation and head != (generation, step, size):
                    raise DivergedError(
                        f"expected step {step} with {size} bytes, but received step {head[1]} with {head[2]} bytes"
                    )
                continue
            head, self._head = self._head, None
            self._expect(_HEAD_BYTES)
            if head[0] == generation:
                return text
        return None

    def _expect(self, size: int) -> None:
        self._coming, self._have = memoryview(bytearray(size)), 0

    def _fill(self) -> bool:
        while self._have < len(self._coming):
            try:
                count = self.connection.recv_into(self._coming[self._have :])
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionError("the other host closed the connection")
            self._have += count
        return True


class Links:
    """The connections of a leader to the leaders of the other hosts."""

    def __init__(
        self, host: int, connections: Mapping[int, tuple[socket.socket, Session]], arena: Arena, timeout: float
    ) -> None:
        self._host = host
        self._links = {other: _Link(*connection) for other, connection in connections.items()}
        self._arena = arena
        self._timeout = timeout
        self._generation = self._step = 0

    def exchange(self, own: Buffer, sizes: Sequence[int]) -> list[Buffer]:
        """Send this host's data to all other leaders, and return the data of all hosts in the order of the hosts.

        Args:
            sizes: size of each host's data in bytes. Data of size 0 is not sent.
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
                if not missing and not any(link.unsent for link in sending):
                    break  # `_wait` would only time out, because nothing more comes
                self._wait(start, missing)
        except (OSError, ProtocolError) as error:
            raise CollectiveAbortedError(f"host {self._host}: the connection to host {other} broke: {error}") from error
        finally:
            for link in sending:
                # Unsent bytes are copied, because the caller may change its tensor after this call.
                link.unsent = [memoryview(bytes(part)) for part in link.unsent]
        return [part for part in received if part is not None]

    def reset(self) -> None:
        """Prepare every leader for new exchanges after an abort. Records from before the reset will be dropped."""
        self._generation += 1
        self._step = 0

    def close(self) -> None:
        for link in self._links.values():
            link.connection.close()

    def _wait(self, start: float, missing: Mapping[int, _Link]) -> None:
        """Wait until a connection can send or receive, at most 20 ms. Raises an error after an abort or the timeout."""
        if self._arena.aborted:
            raise self._arena.abort_error()
        waited = time.monotonic() - start
        if waited > self._timeout:
            raise CollectiveAbortedError(
                f"host {self._host}: no data from hosts {sorted(missing)} within {self._timeout:g} s"
            )
        if waited < SPIN_SECONDS:
            os.sched_yield()
            return
        poll = select.poll()
        for other, link in self._links.items():
            events = (select.POLLIN if other in missing else 0) | (select.POLLOUT if link.unsent else 0)
            if events:
                poll.register(link.connection, events)
        poll.poll(_WATCH_SECONDS * 1000)
