"""Writes the server's log as text or JSON, with the time, the level and the request id, and without prompts."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.errors import did_you_mean

log = logging.getLogger("parallelformers_ng")

_ID = re.compile(r"[!-~]{1,128}")


@dataclass
class Record:
    """Log record of one HTTP request.

    Attributes:
        id: value of the header `X-Request-Id`, or an id that the server chose.
        began: arrival time of the request in seconds, on the clock of `time.monotonic`.
        prompt_tokens: number of tokens in the prompts.
        tokens: number of tokens in the answers.
        first: time of the first token on the clock of `time.monotonic`; 0 if no token has come.
        why: message of the error that the client got; "" for no error.
    """

    id: str
    began: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    tokens: int = 0
    first: float = 0.0
    why: str = ""


_noted: set[tuple[str, str]] = set()
_MOST_NOTED = 256  # clients choose the names


def note_unknown(where: str, name: Any, known: Iterable[str]) -> None:
    """Log once that a request has an unknown field, which the server ignores.

    Args:
        where: route, or class of a part of the request.
        name: name of the field.
        known: names of the known fields.
    """
    key = where, str(name)[:60]
    if key not in _noted and len(_noted) < _MOST_NOTED:
        _noted.add(key)
        log.warning("%s: the server ignores the unknown field %r%s", *key, did_you_mean(key[1], known))


_NONE = Record("-")
current: ContextVar[Record] = ContextVar("current", default=_NONE)
"""Record of the request that the current task serves."""


def new_record(request_id: str) -> Record:
    """Return the record of a new request.

    Args:
        request_id: header `X-Request-Id` of the client; the server replaces it unless it has 1 to 128 visible ASCII
            characters.
    """
    return Record(request_id if _ID.fullmatch(request_id) else secrets.token_hex(12))


def log_access(record: Record, method: str, path: str, status: int) -> None:
    """Write the access log line of a request, at the level "info".

    Args:
        record: record of the request.
        method, path: method and path of the HTTP request; the line has at most 200 characters of the path.
        status: HTTP status; 499 if the client disconnected before the end.
    """
    first = round(record.first - record.began, 4) if record.first else None
    facts: dict[str, Any] = {
        "method": method,
        "path": path[:200],
        "status": status,
        "seconds": round(time.monotonic() - record.began, 4),
    }
    line = "%(method)s %(path)r %(status)d:"
    if record.prompt_tokens:
        facts |= {"prompt_tokens": record.prompt_tokens, "tokens": record.tokens, "first_token_seconds": first}
        line += " %(prompt_tokens)d prompt tokens, %(tokens)d answer tokens,"
        line += "" if first is None else " first token after %(first_token_seconds).3f s,"
    if record.why:
        facts["error"] = record.why[:300]
    line += " end after %(seconds).3f s" + (": %(error)r" if record.why else "")
    log.info(line, facts, extra={"facts": facts})


_TIME = "%Y-%m-%dT%H:%M:%S"


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        record.request = current.get().id
        return super().format(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, _TIME) + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": current.get().id,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def formatter(log_format: str) -> logging.Formatter:
    """Return a formatter of log lines.

    Args:
        log_format: "text" or "json".
    """
    if log_format == "json":
        return _Json()
    return _Text("%(asctime)s.%(msecs)03d %(levelname)s [%(request)s] %(message)s", _TIME)


def set_up_logs(log_format: str, log_level: str) -> None:
    """Set up the log on standard error, unless the program has set up `logging` handlers already.

    Args:
        log_format: "text" or "json".
        log_level: "debug", "info", "warning" or "error"; other libraries log only warnings and errors.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(log_level.upper())
