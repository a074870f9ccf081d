"""Checks every request before the application: API key, size limit, time limits, and clients that disconnect."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
from itertools import chain
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from parallelformers_ng.runtime.freed_memory import give_back_freed
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.logs import current, log_access, new_record
from parallelformers_ng.serving.metrics import CLIENT_WENT, Metrics
from parallelformers_ng.serving.serve_options import ServeOptions

_OPEN = "/health"
"""Path that needs no key, and that is served even while the server shuts down."""
_PROBES = ("/ready", "/metrics")
"""Paths that need no key if `--open-probes` is set."""
LARGE_BYTES = 64 << 10
LARGE_BYTES_A_SECOND = 4 << 20
"""Limit of bytes per second for large bodies. Parsing 1 MB of JSON blocks all answers for about 15 ms."""
_CALM_SECONDS = 1.0
REFUSALS_A_SECOND = 40
_REFUSALS_AT_ONCE = 20
MAX_HEADER_BYTES = 32 << 10


class _RateLimiter:
    """Rate limiter: callers wait for their turn in order of arrival."""

    def __init__(self, a_second: float, at_once: float = 1.0) -> None:
        self._a_second = a_second
        self._before = (at_once - 1) / a_second
        self._free = 0.0  # the next caller may pass at this time of the event loop's clock

    def wait(self) -> float:
        return max(0.0, self._free - asyncio.get_running_loop().time())

    async def turn(self, amount: float = 1.0) -> None:
        """Wait until the rate limit allows the next `amount` of bytes or requests."""
        wait = self.wait()
        self._free = max(self._free, asyncio.get_running_loop().time() - self._before) + amount / self._a_second
        await asyncio.sleep(wait)


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
            self._end_limit()  # a running request has complete headers; `AccessGuard` limits the time for its body
        elif self._limit is None:
            self._limit = self.loop.call_later(self.seconds, self.transport.close)

    def _end_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


class AccessGuard:
    """ASGI middleware that checks each request before the application `app` answers it.

    The guard reads the whole request within limits of bytes and seconds. If the client disconnects afterwards, the
    guard cancels the work. Two rate limits keep a flood of requests from occupying the CPU: bodies above 64 KiB share
    4 MiB per second, and responses with status 400 to 499 are limited to about 40 per second.

    The guard itself refuses requests with status 401, 408, 413, 431 or 503, and closes WebSocket connections. The guard
    adds the header `X-Request-Id` to each response, counts each request, and writes the access log.

    Attributes:
        draining: whether the server is shutting down and refuses new requests.
        in_flight: number of requests that are being served.
        metrics: counters of refused, failed and canceled requests.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, reads_media: bool = False) -> None:
        self._app = app
        self._options = options
        self._max_body_bytes = options.media_bytes if reads_media else options.max_body_bytes or 1 << 20
        self.metrics = metrics
        self.draining = False
        self.in_flight = 0
        self._giving_back: asyncio.Future[None] | None = None
        self._large = _RateLimiter(LARGE_BYTES_A_SECOND)
        self._refusals = _RateLimiter(REFUSALS_A_SECOND, _REFUSALS_AT_ONCE)
        self._served: ASGIApp = self._serve
        if options.cors:
            methods, seen = ["GET", "POST"], ["X-Request-Id"]
            # CORS comes before the checks, because preflight requests have no key, and pages must read refusals.
            self._served = CORSMiddleware(self._serve, options.cors, methods, allow_headers=["*"], expose_headers=seen)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        record = new_record(Request(scope).headers.get("x-request-id", ""))
        current.set(record)  # a context variable, so only this request's task sees the record
        status, ended = CLIENT_WENT, False

        async def noting(message: Message) -> None:
            """Record the status, and send a message with a time limit for slow clients and a rate limit for errors."""
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode("latin-1"))]
                if 400 <= status < 500 and self._refusals.wait() < self._options.client_timeout:
                    await self._refusals.turn()
            async with asyncio.timeout(self._options.client_timeout):
                await send(message)
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body", False))

        self.in_flight += 1
        try:
            with contextlib.suppress(TimeoutError):  # the client reads the answer too slowly
                await self._served(scope, receive, noting)
        finally:
            self.in_flight -= 1
            status = status if ended else CLIENT_WENT
            self.metrics.served(status)
            if not self._options.no_access_log:
                log_access(record, scope["method"], scope["path"], status)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            body = await self._body(Request(scope, receive))
            if len(body) > LARGE_BYTES:
                if self._large.wait() > self._options.client_timeout:
                    raise ApiError(503, "too many large requests are waiting; try again later", code="overloaded")
                await self._large.turn(len(body))
        except ClientDisconnect:
            return
        except ApiError as error:
            response = error.response()
            response.headers["Connection"] = "close"  # because the server does not read the rest of the request
            await response(scope, receive, send)
            return
        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        disconnected = asyncio.ensure_future(_pass_disconnect(receive, messages))
        if scope["method"] == "HEAD":  # routes handle only GET; uvicorn drops the body
            scope = {**scope, "method": "GET"}
        work = asyncio.ensure_future(self._app(scope, messages.get, send))
        try:
            await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, disconnected):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, Exception):
                await work  # its errors are ignored, because the application has sent and logged them
            if len(body) > LARGE_BYTES and (self._giving_back is None or self._giving_back.done()):
                self._giving_back = asyncio.ensure_future(self._give_back())

    async def _give_back(self) -> None:
        """Return freed memory to the system a second after a large body; the allocator would keep it."""
        await asyncio.sleep(_CALM_SECONDS)
        await asyncio.to_thread(give_back_freed)

    def _check(self, scope: Scope) -> None:
        if scope["path"] == _OPEN or (self._options.open_probes and scope["path"] in _PROBES):
            return
        if sum(map(len, chain(*scope["headers"]))) > MAX_HEADER_BYTES:
            raise ApiError(431, f"the headers are larger than {MAX_HEADER_BYTES} bytes")
        if self.draining:
            raise ApiError(503, "the server is shutting down; use another server, or try again later", code="draining")
        if self._options.api_key is not None and not self._has_key(scope):
            why = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise ApiError(401, why, code="invalid_api_key")

    def _has_key(self, scope: Scope) -> bool:
        """Whether a request has the API key: as bearer token from OpenAI's clients, or as password from browsers."""
        assert self._options.api_key is not None
        sent = Request(scope).headers.get("authorization", "").encode("latin-1")
        kind, _, key = sent.strip().partition(b" ")
        if kind.lower() == b"basic":
            try:
                key = base64.b64decode(key).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(key.strip(), self._options.api_key.encode())

    async def _body(self, request: Request) -> bytes:
        limit = self._max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > limit:
            raise too_large
        body = bytearray()
        seconds = self._options.client_timeout
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise ApiError(408, f"the client did not send the whole request within {seconds:g} s") from None
        return bytes(body)


async def _pass_disconnect(receive: Receive, messages: asyncio.Queue[Message]) -> None:
    """Wait until the client disconnects, and put the disconnect message into the application's queue."""
    while (message := await receive())["type"] != "http.disconnect":
        pass
    messages.put_nowait(message)
