"""Tests that exceptions of signal handlers reach the caller, also while a message is read or written."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from parallelformers_ng.errors import NotPortableError
from parallelformers_ng.wire.message import encode, parcel, unpack


class Interrupted(Exception):
    """Raised by the program's signal handler."""


def strike(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


class Struck:
    """An object that a signal interrupts when it is rebuilt, or when it is written."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __reduce__(self) -> Any:
        if self.when == "written":
            strike()
        return strike, ()


class Handler:
    def __call__(self, *_: Any) -> None:
        raise Interrupted

    def method(self, *_: Any) -> None:
        raise Interrupted


def function(*_: Any) -> None:
    raise Interrupted


@pytest.fixture(params=[function, Handler(), Handler().method], ids=["function", "object", "method"])
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler")
def test_exceptions_of_handlers_pass_through_messages() -> None:
    message = parcel([Struck("read")])
    with pytest.raises(Interrupted):
        unpack(*message)
    with pytest.raises(Interrupted):
        encode([Struck("written")])


def test_other_exceptions_are_not_portable() -> None:
    class Broken:
        def __reduce__(self) -> Any:
            return int, ("no number",)

    with pytest.raises(NotPortableError, match="could not be rebuilt"):
        unpack(*parcel(Broken()))
