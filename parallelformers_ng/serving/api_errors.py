"""Formats errors for OpenAI's clients: an HTTP status, and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from parallelformers_ng.errors import BatchingError, ParallelError, did_you_mean
from parallelformers_ng.serving.logs import current, log
from parallelformers_ng.serving.processors import GrammarError

_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
_JSON = re.compile(r"\s*application/([\w.+-]+\+)?json\b", re.IGNORECASE)


_RESPONSE_HEADERS = {
    # This header makes browsers ask for the key.
    401: {"WWW-Authenticate": 'Basic realm="the password is the API key of this server"'},
    503: {"Retry-After": "1"},  # the client should send the request again after 1 second
}


class ApiError(Exception):
    """Error response: HTTP status, message, request field at fault (`param`), and name of the error (`code`)."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        current.get().why = str(self)  # the access log shows this message
        kind = _TYPES.get(self.status) or ("server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, _RESPONSE_HEADERS.get(self.status))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


@contextlib.contextmanager
def refusing(kinds: tuple[type[Exception], ...], what: str, param: str) -> Iterator[None]:
    """Convert errors of the types `kinds` in the block to status 400, with the message "{what}: {error}"."""
    try:
        yield
    except kinds as error:
        raise bad_request(f"{what}: {error}", param) from None


def api_error(error: Exception) -> ApiError:
    """Convert any exception to an `ApiError`, and log the exception if the server or its workers are at fault."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarError):  # a rank raises it for a grammar that only fails during decoding
        return bad_request("the constraint is too complex, or allows no next token; send a simpler constraint")
    if isinstance(error, BatchingError) and error.option not in ("", "waiting"):
        flag = "--" + error.option.replace("_", "-")
        message = f"{str(error).partition('; ')[0]}; send a smaller request, or start the server with a larger {flag}"
        return bad_request(message, code="context_length_exceeded")
    if isinstance(error, BatchingError):
        return ApiError(503, f"{str(error).partition('; ')[0]}; send the request again later", code="overloaded")
    if isinstance(error, TimeoutError):  # a time limit of the server or of the model has passed
        message = "the request reached its time limit; ask for fewer tokens, or send the request again later"
        return ApiError(503, message, code="timeout")
    if isinstance(error, ParallelError):  # a worker failed; workers restart if possible, so a later request may succeed
        log.error("%s: %s", type(error).__name__, error)
        return ApiError(503, "the model cannot answer now; send the request again", code=type(error).__name__)
    log.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed with {type(error).__name__}; see the log of the server")


def install(app: FastAPI) -> None:
    """Register exception handlers that answer every error in OpenAI's format.

    A request that does not fit a pydantic model gets status 400 instead of FastAPI's 422. Errors of routing, such as an
    unknown path, keep their status.
    """

    @app.exception_handler(ApiError)
    @app.exception_handler(ParallelError)
    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return api_error(error).response()

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        path, message = request.url.path, str(error.detail)
        if error.status_code == 404:
            message = f"no route has the path {path}{did_you_mean(path, [route.path for route in request.app.routes])}"
        elif error.status_code == 405:
            message = f"{path} does not accept {request.method}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    @app.exception_handler(ValidationError)
    async def invalid(request: Request, error: RequestValidationError | ValidationError) -> JSONResponse:
        # Pydantic reports an error for each member of a union; the deepest error is of the member that fits best.
        first = max(error.errors(), key=lambda each: len(each["loc"]))
        if first["type"] == "json_invalid":
            place = f"{first['ctx']['error']} at character {first['loc'][-1]}"
            return bad_request(f"the body is not valid JSON: {place}").response()
        if first["loc"] == ("body",):
            content_type = request.headers.get("content-type", "")
            why = "is no JSON object" if _JSON.match(content_type) else f"has the content type {content_type[:60]!r}"
            return bad_request(f"the body {why}; send JSON with the header Content-Type: application/json").response()
        where = ".".join(str(part) for part in first["loc"] if part != "body" and not {*"[("} & {*str(part)})
        return bad_request(f"{where}: {first['msg']}" if where else first["msg"], where or None).response()
