"""Tests the walk over objects, the comparison of their contents, and the difference between user and libraries."""

from __future__ import annotations

import array
import enum
import functools
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallelformers_ng.live_code.content import digest
from parallelformers_ng.live_code.object_graph import is_same
from parallelformers_ng.live_code.state import State
from parallelformers_ng.origins import is_library


class OwnTable(dict):
    pass


class Slotted:
    __slots__ = ("scale",)


class Mode(enum.Enum):
    FAST = 1


def scaled(table: dict[str, float]) -> Callable[[], float]:
    @functools.lru_cache
    @torch.no_grad()
    def scale() -> float:
        return table["scale"]

    return scale


SLOTTED, TABLE = Slotted(), {"scale": 1.0}
CHANGES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "bytes": (bytearray(b"a"), lambda value: value.extend(b"b")),
    "array": (array.array("d", [1.0]), lambda value: value.append(2.0)),
    "array of dates": (np.array(["2026-01-01"], dtype="M8[D]"), lambda value: value.fill("2026-01-02")),
    "array of objects": (np.array([None, "a"]), lambda value: value.__setitem__(0, "b")),
    "own table": (OwnTable(scale=1.0), lambda value: value.update(scale=2.0)),
    "attribute of own table": (OwnTable(), lambda value: setattr(value, "scale", 2.0)),
    "new slot": (SLOTTED, lambda value: setattr(value, "scale", 2.0)),
    "order": ({"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "closure behind decorators": (scaled(TABLE), lambda _: TABLE.update(scale=2.0)),
    "argument of a partial function": (functools.partial(max, [1]), lambda value: value.args[0].append(2)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_in_place_are_noticed(name: str) -> None:
    value, change = CHANGES[name]
    state = State(value)
    assert state
    assert state.holds()
    change(value)
    assert not state.holds()


def test_generators_and_enumerations_have_no_state() -> None:
    assert not State((random.Random(0), torch.Generator(), Mode.FAST, 1, "a"))


def test_equal_plain_values_are_the_same() -> None:
    assert is_same((1, ("a", None)), (1, ("a", None)))
    assert not is_same((1, []), (1, []))
    assert not is_same(1, True)


def test_digests_cover_items_of_subclasses() -> None:
    assert digest(OwnTable(a=1)) != digest(OwnTable(a=2))
    assert digest(torch.Size([1])) != digest(torch.Size([2]))


def test_libraries_are_in_site_packages_and_not_editable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in {
        "installed_package": "/venv/lib/python3.11/site-packages/installed_package/__init__.py",
        "editable_package": "/home/user/editable_package/src/editable_package/__init__.py",
        "my_packages": "/home/user/my-packages/my_packages.py",
    }.items():
        module = types.ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    assert is_library("installed_package.not_loaded")
    assert not is_library("editable_package")
    assert not is_library("my_packages")
    assert all(map(is_library, ("json", "numpy.random", "torch.nn", "transformers", "parallelformers_ng.api")))
    assert not any(map(is_library, ("__main__", __name__, "")))


def test_library_that_is_not_imported_is_a_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank gets classes of libraries that only the caller has imported, by value."""
    for folder, package in (("venv/site-packages", "some_library"), ("src", "some_program")):
        (tmp_path / folder / package).mkdir(parents=True)
        (tmp_path / folder / package / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / folder)
    (tmp_path / "venv/site-packages/spaces").mkdir()
    assert is_library("some_library.part")
    assert is_library("spaces.part")
    assert not is_library("some_program")
    assert not is_library("nowhere_at_all")
