"""The guard in front of every request: keys, limits of size and time, and clients that have gone."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
from itertools import chain

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parallelformers_ng.runtime.freed_memory import give_back_freed
from parallelformers_ng.serving.api_errors import ApiError
from parallelformers_ng.serving.logs import current, log_access, new_record
from parallelformers_ng.serving.metrics import CLIENT_WENT, Metrics
from parallelformers_ng.serving.serve_options import ServeOptions

_OPEN = "/health"
"""The path that needs no key, and that is served to the end."""
_PROBES = ("/ready", "/metrics")
"""Paths that `--open-probes` opens as well."""
LARGE_BYTES = 64 << 10
LARGE_BYTES_A_SECOND = 4 << 20
"""Of large bodies. To read a megabyte of JSON takes about 15 ms, in which no token of any answer goes on."""
_CALM_SECONDS = 1.0
REFUSALS_A_SECOND = 40
_REFUSALS_AT_ONCE = 20
MOST_HEADER_BYTES = 32 << 10


class _Pace:
    """Lets so much of something pass in a second, one after another.

    Args:
        a_second: how much.
        at_once: how much may pass without a wait after none has for long.
    """

    def __init__(self, a_second: float, at_once: float = 1.0) -> None:
        self._a_second = a_second
        self._before = (at_once - 1) / a_second
        self._free = 0.0  # from when the next may pass, on the loop's clock

    def wait(self) -> float:
        """Return seconds until the next may pass."""
        return max(0.0, self._free - asyncio.get_running_loop().time())

    async def turn(self, amount: float = 1.0) -> None:
        """Wait for the turn of so much."""
        wait = self.wait()
        self._free = max(self._free, asyncio.get_running_loop().time() - self._before) + amount / self._a_second
        await asyncio.sleep(wait)


class AccessGuard:
    """Serves an application to those who may use it.

    A request is read whole, within its limits of bytes and seconds, before the application sees it. After that the
    client can only go, which cancels its work. Bytes of large bodies, and refusals, are limited per second: so a flood
    of them leaves the processor to other clients.

    Args:
        app: the application.
        options: key and limits.
        metrics: count what is refused, fails or is cancelled.
        reads_media: whether requests may have pictures or sound.

    Attributes:
        draining: whether new requests are refused, as the server is about to end.
        in_flight: how many requests are being served.
        metrics: see above.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics, reads_media: bool = False) -> None:
        self._app = app
        self._options = options
        self._max_body_bytes = options.media_bytes if reads_media else options.max_body_bytes or 1 << 20
        self.metrics = metrics
        self.draining = False
        self.in_flight = 0
        self._giving_back: asyncio.Future[None] | None = None
        self._large = _Pace(LARGE_BYTES_A_SECOND)
        self._refusals = _Pace(REFUSALS_A_SECOND, _REFUSALS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        record = new_record(_header(scope, b"x-request-id"))
        token = current.set(record)
        status, ended = CLIENT_WENT, False

        async def noting(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode("latin-1"))]
            await send(message)
            ended = ended or (message["type"] == "http.response.body" and not message.get("more_body", False))

        self.in_flight += 1
        try:
            await self._serve(scope, receive, self._patient(noting))
        finally:
            self.in_flight -= 1
            status = status if ended else CLIENT_WENT
            self.metrics.served(status)
            if not self._options.no_access_log:
                log_access(record, scope["method"], scope["path"], status)
            current.reset(token)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
            async with asyncio.timeout(self._options.client_timeout):
                body = await self._body(scope, receive)
            if body is not None and len(body) > LARGE_BYTES:
                if self._large.wait() > self._options.client_timeout:
                    raise ApiError(503, "too many large requests are waiting; ask again later", code="overloaded")
                await self._large.turn(len(body))
        except ApiError as error:
            await self._refuse(error, scope, receive, send)
            return
        except TimeoutError:
            seconds = self._options.client_timeout
            await self._refuse(ApiError(408, f"the request was not there within {seconds:g} s"), scope, receive, send)
            return
        if body is None:
            return
        gone = asyncio.ensure_future(_gone(receive))
        work = asyncio.ensure_future(self._app(scope, _replay(body, gone), send))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, TimeoutError, Exception):
                await work  # the application has told and logged what went wrong
            if len(body) > LARGE_BYTES and (self._giving_back is None or self._giving_back.done()):
                self._giving_back = asyncio.ensure_future(self._give_back())

    async def _give_back(self) -> None:
        """Large bodies leave much freed memory behind, and the allocator would keep more with each."""
        await asyncio.sleep(_CALM_SECONDS)
        await asyncio.to_thread(give_back_freed)

    def _check(self, scope: Scope) -> None:
        if scope["path"] == _OPEN or (self._options.open_probes and scope["path"] in _PROBES):
            return
        if sum(map(len, chain(*scope["headers"]))) > MOST_HEADER_BYTES:
            raise ApiError(431, f"the headers are larger than {MOST_HEADER_BYTES} bytes")
        if self.draining:
            raise ApiError(503, "the server is about to end; ask another, or later", code="draining")
        # A preflight is sent by the browser itself, which adds no key.
        preflight = scope["method"] == "OPTIONS" and self._options.cors
        if self._options.api_key is not None and not preflight and not self._has_key(scope):
            raise ApiError(401, "the key is missing or wrong: Authorization: Bearer KEY", code="invalid_api_key")

    def _has_key(self, scope: Scope) -> bool:
        """Return whether the request brings the key: as OpenAI's clients do, or as the password that a browser asks
        for."""
        assert self._options.api_key is not None
        kind, _, key = _header(scope, b"authorization").strip().partition(b" ")
        if kind.lower() == b"basic":
            try:
                key = base64.b64decode(key).partition(b":")[2]
            except binascii.Error:
                return False
        elif kind.lower() != b"bearer":
            return False
        return hmac.compare_digest(key.strip(), self._options.api_key.encode())

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        response = error.response()
        response.headers["Connection"] = "close"  # whatever else the client sends need not be read
        app: ASGIApp = response
        if self._options.cors:  # a page of another origin reads why
            app = CORSMiddleware(response, allow_origins=self._options.cors)
        with contextlib.suppress(TimeoutError):
            await app(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body of a request, None if the client has gone."""
        limit, parts, size = self._max_body_bytes, [], 0
        announced = _header(scope, b"content-length")
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _patient(self, send: Send) -> Send:
        """`send`, for clients that read. One that does not is left, and one that is refused waits for its turn."""

        async def sending(message: Message) -> None:
            if 400 <= message.get("status", 0) < 500 and self._refusals.wait() < self._options.client_timeout:
                await self._refusals.turn()
            async with asyncio.timeout(self._options.client_timeout):
                await send(message)

        return sending


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes (--max-body-bytes)")


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def _gone(receive: Receive) -> None:
    """Waits until the client is."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes, gone: asyncio.Future[None]) -> Receive:
    """Return a `receive` that brings a body, and then waits for the end."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await asyncio.wait({gone})
        return {"type": "http.disconnect"}

    return receive
