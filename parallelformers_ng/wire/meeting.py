"""Connects two processes on different hosts over TCP; each process proves that it knows a secret key.

    listener → caller    greeting | nonce
    caller → listener    nonce | purpose | HMAC(key, "calls" | nonces | purpose)
    listener → caller    HMAC(key, "listens" | nonces | purpose)

The secret key itself is never sent. The secret key and both nonces give two connection keys, one for each direction, so
that no record of another connection can be replayed. The listener drops a caller without the key after three short
messages of fixed sizes, or after five seconds. Nothing that such a caller sends is parsed.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import time
from dataclasses import dataclass

from parallelformers_ng.errors import ChannelClosedError, ProtocolError, RequestTimeoutError
from parallelformers_ng.wire.signed import Session, signature
from parallelformers_ng.wire.transport import wait

LOST_SECONDS = 4
"""Seconds until a silent host counts as gone, for example after a power loss or a network failure."""

_GREETING = b"parallelformers_ng/1 "
_NONCE = _PROOF = 32
_PURPOSE = 32
_ANSWER = _NONCE + _PURPOSE + _PROOF
_PATIENCE = 5.0  # seconds that a caller has to prove that it knows the key
_STRANGERS = 256  # maximum number of connections whose callers have not yet proved that they know the key

Address = tuple[str, int]


@dataclass
class _Stranger:
    """A connection whose caller has not yet proved that it knows the key."""

    connection: socket.socket
    nonce: bytes
    until: float
    received: bytes = b""


class Listener:
    """A TCP listener that accepts callers from this host or other hosts if the callers know the key.

    Caller and listener prove to each other that they know the key, by HMAC-SHA256 signatures of random bytes. The key
    itself is never sent.

    Attributes:
        address: host, and the port that the system chose.
    """

    def __init__(self, host: str, key: bytes) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"{host!r} stands for every interface of this machine; name the cluster's interface")
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._strangers: dict[int, _Stranger] = {}
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def accept(self, deadline: float) -> tuple[bytes, tuple[socket.socket, Session]]:
        """Wait for the next caller that knows the key. Return its purpose, non-blocking connection and session.

        A caller has 5 s to prove that it knows the key. If more than 256 callers have not proved this yet, the listener
        disconnects the earliest of these callers.
        """
        while True:
            for fd, _ in self._poll.poll(0):
                if fd == self._socket.fileno():
                    self._greet()
                elif fd in self._strangers and (admitted := self._hear(fd)) is not None:
                    return admitted
            now = time.monotonic()  # read answers first: callers may have sent them while `accept` was not running
            for fd in [fd for fd, stranger in self._strangers.items() if stranger.until <= now]:
                self._leave(fd)
            patient = min([deadline, *(stranger.until for stranger in self._strangers.values())])
            try:
                wait(self._poll, patient, "nobody called before the deadline")
            except RequestTimeoutError:
                if patient == deadline:
                    raise

    def close(self) -> None:
        """Stop listening. Accepted connections stay open."""
        for fd in list(self._strangers):
            self._leave(fd)
        self._socket.close()

    def _greet(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # the caller has disconnected, or this process cannot open more files
            return
        if len(self._strangers) >= _STRANGERS:
            self._leave(next(iter(self._strangers)))
        stranger = _Stranger(connection, secrets.token_bytes(_NONCE), time.monotonic() + _PATIENCE)
        connection.setblocking(False)
        self._strangers[connection.fileno()] = stranger
        self._poll.register(connection, select.POLLIN)
        self._say(connection.fileno(), _GREETING + stranger.nonce)

    def _say(self, fd: int, text: bytes) -> bool:
        """Send a short text, which fits into an empty send buffer; disconnect the caller if sending fails."""
        try:
            if self._strangers[fd].connection.send(text, socket.MSG_NOSIGNAL) == len(text):
                return True
        except OSError:
            pass
        self._leave(fd)
        return False

    def _hear(self, fd: int) -> tuple[bytes, tuple[socket.socket, Session]] | None:
        stranger = self._strangers[fd]
        try:
            data = stranger.connection.recv(_ANSWER - len(stranger.received))
        except OSError:
            data = b""
        stranger.received += data
        if data and len(stranger.received) < _ANSWER:
            return None
        answer = stranger.received
        nonces, purpose = stranger.nonce + answer[:_NONCE], answer[_NONCE : _NONCE + _PURPOSE]
        expected = signature(self._key, "calls", nonces + purpose)
        if not data or not hmac.compare_digest(expected, answer[-_PROOF:]):
            self._leave(fd)
            return None
        if not self._say(fd, signature(self._key, "listens", nonces + purpose)):
            return None
        del self._strangers[fd]
        self._poll.unregister(fd)
        caller_key, listener_key = _keys(self._key, nonces)
        _watch_peer(stranger.connection)
        return purpose.rstrip(b"\0"), (stranger.connection, Session(listener_key, caller_key))

    def _leave(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._strangers.pop(fd).connection.close()


def call(address: Address, key: bytes, purpose: bytes, deadline: float) -> tuple[socket.socket, Session]:
    """Connect to a listener; both sides prove that they know the key. `purpose` has up to 32 bytes."""
    assert len(purpose) <= _PURPOSE
    where = f"{address[0]}, port {address[1]},"
    connection = None
    try:
        rest = deadline - time.monotonic()
        connection = socket.create_connection(address, timeout=None if rest == float("inf") else max(rest, 0.001))
        _watch_peer(connection)
        greeting = _take(connection, len(_GREETING) + _NONCE, deadline)
        if not greeting.startswith(_GREETING):
            raise ProtocolError(f"{where} is not a listener of parallelformers_ng")
        nonce, purpose = secrets.token_bytes(_NONCE), purpose.ljust(_PURPOSE, b"\0")
        nonces = greeting[len(_GREETING) :] + nonce
        connection.sendall(nonce + purpose + signature(key, "calls", nonces + purpose))
        proof = _take(connection, _PROOF, deadline)
        if not hmac.compare_digest(signature(key, "listens", nonces + purpose), proof):
            raise ProtocolError(f"{where} does not know the key of this group")
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, TimeoutError):
            raise RequestTimeoutError(f"{where} did not answer before the deadline") from None
        if isinstance(error, OSError):
            raise ChannelClosedError(f"{where} cannot be reached: {error.strerror or error}") from error
        raise
    caller_key, listener_key = _keys(key, nonces)
    return connection, Session(caller_key, listener_key)


def _take(connection: socket.socket, count: int, deadline: float) -> bytes:
    taken = b""
    while len(taken) < count:
        rest = deadline - time.monotonic()
        connection.settimeout(None if rest == float("inf") else max(rest, 0.001))
        data = connection.recv(count - len(taken))
        if not data:
            raise ChannelClosedError("the listener closed the connection; it may have another key")
        taken += data
    return taken


def _keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the two keys of a connection: for records from the caller, and for records from the listener."""
    return signature(key, "from who calls", nonces), signature(key, "from who listens", nonces)


def _watch_peer(connection: socket.socket) -> None:
    """Configure a socket to send small messages at once, and to detect a lost host within `LOST_SECONDS`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
