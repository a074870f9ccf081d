"""Brings log records of the ranks to the logging of the process that uses the ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import logging.handlers
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("parallelformers_ng")

SWITCH = "PARALLELFORMERS_NG_DEBUG"  # environment variable; if it is 1, ranks log requests, collectives and rounds
_SECONDS = 1.0  # longest wait of a rank for slow log handlers of the caller, and of `close` for the last records
_MAX_BYTES = 1 << 20


def are_detailed() -> bool:
    return os.environ.get(SWITCH) == "1"


class RankRecords:
    """Passes the log records of a group's ranks to the loggers of the caller's process.

    Log handlers are code of the user and may be slow, so a separate thread calls them. The thread ends when all
    processes have closed `theirs`, the sending end of the socket.
    """

    def __init__(self) -> None:
        # SEQPACKET keeps the records of several ranks apart.
        ours, self.theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=_pass_on, args=(ours,), name="parallelformers_ng-records", daemon=True)
        self._thread.start()
        if are_detailed():
            log.setLevel(logging.DEBUG)
            logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")

    def close(self) -> None:
        self.theirs.close()
        self._thread.join(_SECONDS)


def _pass_on(connection: socket.socket) -> None:
    first: dict[str, str] = {}  # text of a record → name of the first logger with this text
    with connection:
        while data := connection.recv(_MAX_BYTES):
            record = logging.makeLogRecord(json.loads(data))
            logger = logging.getLogger(record.name)
            # Ranks run the same code, so most warnings come from every rank.
            is_repeated = record.levelno >= logging.INFO and first.setdefault(record.msg, record.name) != record.name
            if not is_repeated and logger.isEnabledFor(record.levelno):
                logger.handle(record)


class _ToCaller(logging.handlers.QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        record.name = self.name or ""
        with contextlib.suppress(OSError):
            self.queue.send(json.dumps(vars(record), default=str).encode())  # type: ignore[attr-defined]  # a socket


def send_records(rank: int, connection: socket.socket) -> None:
    """Send this library's log records to the caller's process from now on. The loggers of that process filter them."""
    connection.settimeout(_SECONDS)
    handler = _ToCaller(connection)  # type: ignore[arg-type]
    handler.name = f"{log.name}.rank{rank}"
    log.addHandler(handler)
    log.propagate = False
    log.setLevel(logging.DEBUG if are_detailed() else logging.INFO)
    log.isEnabledFor = log.level.__le__  # type: ignore[assignment, method-assign]  # `logging.disable` is for all other loggers


def log_calls(owner: type, name: str, describe: Callable[..., str]) -> None:
    """Log the begin and the end of each call of a method from now on. `describe` gets the arguments of the call."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def logged(*args: Any, **kwargs: Any) -> Any:
        text, began = describe(*args, **kwargs), time.monotonic()
        log.debug("begin: %s", text)
        result = method(*args, **kwargs)
        log.debug("end: %s, after %.1f ms", text, 1000 * (time.monotonic() - began))
        return result

    setattr(owner, name, logged)
