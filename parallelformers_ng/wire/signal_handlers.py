"""Recognizes exceptions of the user's signal handlers, which may interrupt any code, so that no code catches them."""

from __future__ import annotations

import signal
import traceback


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user raised the exception, so that it must reach the caller unchanged."""
    handlers = [*filter(callable, map(signal.getsignal, signal.valid_signals()))]
    codes = {getattr(each, "__code__", getattr(type(each).__call__, "__code__", None)) for each in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def raise_if_of_handler(error: Exception) -> None:
    """Raise the exception again if a signal handler of the user raised it; call this after catching any exception."""
    if is_of_handler(error):
        raise error
