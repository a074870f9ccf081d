"""Connections that do not wait for ever: a client has so long to send the head of a request as it has for the rest."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PatientProtocol(H11Protocol):
    """uvicorn's, which waits as long as a client sends a byte now and then.

    Attributes:
        seconds: from the first byte of a request, or from the connection, to the end of the request's head.
    """

    seconds = 30.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._time()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_limit()
        super().connection_lost(exc)

    def _time(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._end_limit()  # a request is there; the guard times its body
        elif self._limit is None:
            self._limit = self.loop.call_later(self.seconds, self.transport.close)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
