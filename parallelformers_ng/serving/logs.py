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
    """Log record of one HTTP request."""

    id: str  # value of the client's header `X-Request-Id`, or a random id
    began: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    tokens: int = 0  # sum over all answers to the request
    first: float = 0.0  # `time.monotonic` at the first token; 0 before the first token
    why: str = ""  # error message that the client got; "" without an error


_noted: set[tuple[str, str]] = set()
_MAX_NOTED = 256  # clients choose the field names, so without a limit they could fill memory and log


def note_unknown(where: str, name: Any, known: Iterable[str]) -> None:
    """Log once that a request has an unknown field, which the server ignores."""
    key = where, str(name)[:60]
    if key not in _noted and len(_noted) < _MAX_NOTED:
        _noted.add(key)
        log.warning("%s: the server ignores the unknown field %r%s", *key, did_you_mean(key[1], known))


current: ContextVar[Record] = ContextVar("current", default=Record("-"))  # noqa: B039
"""Record of the request that the current task serves."""


def new_record(request_id: str) -> Record:
    """Make the log record of a request. A client's id that is not 1 to 128 visible ASCII characters is replaced."""
    return Record(request_id if _ID.fullmatch(request_id) else secrets.token_hex(12))


def log_access(record: Record, method: str, path: str, status: int) -> None:
    """Write the access log line of a request, at the level "info"."""
    first = round(record.first - record.began, 4) if record.first else None
    seconds = round(time.monotonic() - record.began, 4)
    facts: dict[str, Any] = {"method": method, "path": path[:200], "status": status, "seconds": seconds}
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
    if log_format == "json":
        return _Json()
    return _Text("%(asctime)s.%(msecs)03d %(levelname)s [%(request)s] %(message)s", _TIME)


def set_up_logs(log_format: str, log_level: str) -> None:
    """Set up the log on standard error, unless the program has set up `logging` handlers already."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(log_level.upper())
