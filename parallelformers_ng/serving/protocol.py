"""Limits the time that a client may take to send the headers of a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """HTTP protocol of uvicorn with a time limit for the headers of each request.

    After the time limit, the protocol closes the connection. uvicorn's own protocol has no such limit: a client can
    hold a connection by sending single bytes.

    Attributes:
        seconds: time limit in seconds from the connection, or from the first byte of a later request, to the end of the
            headers.
    """

    seconds = 30.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_limit()
        super().connection_lost(exc)

    def _update_limit(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_limit()  # the headers are complete; the guard limits the time for the body
        elif self._limit is None:
            self._limit = self.loop.call_later(self.seconds, self.transport.close)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
