"""Tests what of an exception of a rank arrives in the caller."""

from __future__ import annotations

import os
import threading

import pytest

from parallelformers_ng.errors import UnsupportedPlatformError, WorkerError
from parallelformers_ng.runtime.failures import Description, describe, rebuild
from parallelformers_ng.runtime.placement import check_platform


class Coded(ValueError):
    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code, self.rows, self.lock = code, [1, {"a": (2,)}], threading.Lock()


class WithNew(ValueError):
    def __new__(cls, *, needed: int) -> WithNew:
        return super().__new__(cls, needed)

    def __init__(self, *, needed: int) -> None:
        super().__init__(str(needed))


def _described(error: Exception) -> Description:
    try:
        raise error
    except Exception as raised:
        return describe(raised)


def test_plain_attributes_and_notes_arrive() -> None:
    original = Coded("text", 7)
    original.add_note("a note")
    error = rebuild(1, _described(original))
    assert isinstance(error, Coded)
    assert (error.code, error.rows, error.rank) == (7, [1, {"a": (2,)}], 1)
    assert "a note" in error.__notes__
    assert not hasattr(error, "lock")


def test_groups_arrive_as_groups() -> None:
    inner = ExceptionGroup("inner", [KeyError("b")])
    error = rebuild(0, _described(ExceptionGroup("several (2)", [ValueError("a"), inner])))
    assert isinstance(error, ExceptionGroup)
    assert isinstance(error, WorkerError)
    assert error.message == "several (2)"
    assert error.split(ValueError)[0].exceptions[0].args == ("a",)
    assert error.split(KeyError)[0] is not None


def test_classes_that_cannot_be_made_arrive_as_text() -> None:
    error = rebuild(0, _described(WithNew(needed=3)))
    assert type(error) is WorkerError
    assert "WithNew: 3" in str(error)


@pytest.mark.parametrize("name", ["memfd_create", "pidfd_open"])
def test_forbidden_system_calls_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    check_platform()
    monkeypatch.setattr(os, name, forbidden)
    with pytest.raises(UnsupportedPlatformError, match=name):
        check_platform()
