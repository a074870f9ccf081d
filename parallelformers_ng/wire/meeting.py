"""Two processes on different hosts meet over TCP: each proves that it knows a key before the other listens to it.

    listener → caller    greeting | nonce
    caller → listener    nonce | purpose | HMAC(key, "calls" | nonces | purpose)
    listener → caller    HMAC(key, "listens" | nonces | purpose)

The key itself never crosses. The key and both nonces give the keys of the connection, one for each direction: no record
of another connection can be replayed. A process without the key is dropped after three short messages of fixed sizes,
or after a few seconds of silence; nothing that it sends is parsed.
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
"""How soon a host is found to be gone that says nothing: its machine lost power, or the network is cut."""

_GREETING = b"parallelformers_ng/1 "
_NONCE = _PROOF = 32
_PURPOSE = 32
_ANSWER = _NONCE + _PURPOSE + _PROOF
_PATIENCE = 5.0  # seconds that a stranger has to prove itself
_STRANGERS = 256  # that may be about to prove themselves at one time

Address = tuple[str, int]


@dataclass
class _Stranger:
    connection: socket.socket
    nonce: bytes
    until: float
    said: bytes = b""


class Listener:
    """The address for other hosts.

    Args:
        host: the address of one interface of this machine. One that stands for all of them is refused.
        key: secret key of the callers.

    Attributes:
        address: host and port.

    Raises:
        ValueError: the address stands for every interface.
        OSError: this machine has no such address.
    """

    def __init__(self, host: str, key: bytes) -> None:
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"{host!r} stands for every interface of this machine; name the one of the cluster")
        self._key = key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=128)
        self._socket.setblocking(False)
        self.address: Address = self._socket.getsockname()[:2]
        self._strangers: dict[int, _Stranger] = {}
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def accept(self, deadline: float) -> tuple[bytes, tuple[socket.socket, Session]]:
        """Return the next caller that knows the key: its purpose; the connection and its keys. Others are left.

        Raises:
            RequestTimeoutError: none came before the deadline, on the clock of `time.monotonic`.
        """
        while True:
            for fd, _ in self._poll.poll(0):
                if fd == self._socket.fileno():
                    self._greet()
                elif fd in self._strangers and (admitted := self._hear(fd)) is not None:
                    return admitted
            self._leave_silent()  # once they were heard: they may have answered while nobody listened
            patient = min([deadline, *(stranger.until for stranger in self._strangers.values())])
            try:
                wait(self._poll, patient, "nobody called before the deadline")
            except RequestTimeoutError:
                if patient == deadline:
                    raise

    def close(self) -> None:
        """Listen no more. Connections that were accepted stay."""
        for fd in list(self._strangers):
            self._leave(fd)
        self._socket.close()

    def _greet(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it went, or this process may open no more files: then it calls in vain
            return
        if len(self._strangers) >= _STRANGERS:
            self._leave(next(iter(self._strangers)))
        stranger = _Stranger(connection, secrets.token_bytes(_NONCE), time.monotonic() + _PATIENCE)
        connection.setblocking(False)
        self._strangers[connection.fileno()] = stranger
        self._poll.register(connection, select.POLLIN)
        self._say(connection.fileno(), _GREETING + stranger.nonce)

    def _say(self, fd: int, text: bytes) -> bool:
        """Send what fits any empty buffer. Who does not take it is left."""
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
            said = stranger.connection.recv(_ANSWER - len(stranger.said))
        except OSError:
            said = b""
        stranger.said += said
        if said and len(stranger.said) < _ANSWER:
            return None
        nonces, purpose = stranger.nonce + stranger.said[:_NONCE], stranger.said[_NONCE : _NONCE + _PURPOSE]
        due = signature(self._key, "calls", nonces + purpose)
        if not said or not hmac.compare_digest(due, stranger.said[-_PROOF:]):
            self._leave(fd)
            return None
        if not self._say(fd, signature(self._key, "listens", nonces + purpose)):
            return None
        del self._strangers[fd]
        self._poll.unregister(fd)
        their_key, here = _keys(self._key, nonces)
        _watch_peer(stranger.connection)
        return purpose.rstrip(b"\0"), (stranger.connection, Session(here, their_key))

    def _leave_silent(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, stranger in self._strangers.items() if stranger.until <= now]:
            self._leave(fd)

    def _leave(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._strangers.pop(fd).connection.close()


def call(address: Address, key: bytes, purpose: bytes, deadline: float) -> tuple[socket.socket, Session]:
    """Connect to a listener that knows the key.

    Args:
        address: host and port.
        key: see above.
        purpose: purpose of the connection, up to 32 bytes.
        deadline: on the clock of `time.monotonic`, in seconds.

    Raises:
        ChannelClosedError: nobody listens there, or who does left.
        ProtocolError: the listener does not know the key.
        RequestTimeoutError: it did not answer before the deadline.
    """
    assert len(purpose) <= _PURPOSE
    where = f"{address[0]}, port {address[1]},"
    connection = None
    try:
        rest = deadline - time.monotonic()
        connection = socket.create_connection(address, timeout=None if rest == float("inf") else max(rest, 0.001))
        _watch_peer(connection)
        greeting = _take(connection, len(_GREETING) + _NONCE, deadline)
        if not greeting.startswith(_GREETING):
            raise ProtocolError(f"{where} was called, and something else answered")
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
    their_key, here = _keys(key, nonces)
    return connection, Session(their_key, here)


def _take(connection: socket.socket, count: int, deadline: float) -> bytes:
    taken = b""
    while len(taken) < count:
        rest = deadline - time.monotonic()
        connection.settimeout(None if rest == float("inf") else max(rest, 0.001))
        said = connection.recv(count - len(taken))
        if not said:
            raise ChannelClosedError("who listens has left; it may have another key")
        taken += said
    return taken


def _keys(key: bytes, nonces: bytes) -> tuple[bytes, bytes]:
    """Return the keys of a connection: for what the caller says, and for what the listener does."""
    return signature(key, "from who calls", nonces), signature(key, "from who listens", nonces)


def _watch_peer(connection: socket.socket) -> None:
    """Send small messages at once, and find out soon that the other machine is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_SECONDS - 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_SECONDS * 1000)
