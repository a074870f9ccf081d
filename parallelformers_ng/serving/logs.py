"""The server's log: lines with time, level and the id of the request, as text or JSON. Prompts are never logged."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("parallelformers_ng")

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_ID = re.compile(r"[!-~]{1,128}")


@dataclass
class Record:
    """The record of a request.

    Attributes:
        id: its `X-Request-Id`, or an id of the server's.
        began: when it came, on the clock of `time.monotonic`.
        prompt_tokens, tokens: tokens of its prompts and of its answers.
        first: when its first token came; 0 for none.
    """

    id: str
    began: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    tokens: int = 0
    first: float = 0.0


_NONE = Record("-")
current: ContextVar[Record] = ContextVar("current", default=_NONE)
"""The request that is being served."""


def new_record(request_id: bytes) -> Record:
    """Return the record of a new request.

    Args:
        request_id: `X-Request-Id` as the client sent it; one that is not 1 to 128 visible ASCII characters is replaced.
    """
    text = request_id.decode("latin-1")
    return Record(text if _ID.fullmatch(text) else secrets.token_hex(12))


def log_access(record: Record, method: str, path: str, status: int) -> None:
    """Log that a request was served.

    Args:
        record: record of the request.
        method, path: method and path of the HTTP request.
        status: HTTP status; 499 if the client went before the end.
    """
    now = time.monotonic()
    facts: dict[str, Any] = {
        "method": method,
        "path": path[:_MOST_PATH],
        "status": status,
        "prompt_tokens": record.prompt_tokens,
        "tokens": record.tokens,
        "first_token_seconds": round(record.first - record.began, 4) if record.first else None,
        "seconds": round(now - record.began, 4),
    }
    first = "-" if record.first == 0 else f"{record.first - record.began:.3f}"
    log.info(
        "%s %r %d: %d prompt tokens, %d tokens, first after %s s, all after %.3f s",
        method, facts["path"], status, record.prompt_tokens, record.tokens, first, now - record.began,
        extra={"facts": facts},
    )  # fmt: skip


_MOST_PATH = 200


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s [%(request)s] %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.request = current.get().id
        return super().format(record)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
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
    """Return what makes lines of one of `FORMATS`."""
    return _Json() if log_format == "json" else _Text()


def set_up_logs(log_format: str, log_level: str) -> None:
    """Write the log to standard error. A program that has set up `logging` keeps its handlers.

    Args:
        log_format: one of `FORMATS`.
        log_level: one of `LEVELS`; other libraries' lines come from warnings on.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(log_level.upper())
