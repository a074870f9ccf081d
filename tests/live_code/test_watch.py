"""Tests the watch of code, in C and in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallelformers_ng.live_code import watch
from parallelformers_ng.live_code.reach import Slot
from parallelformers_ng.live_code.watch import CodeWatch

pytestmark = pytest.mark.parametrize("in_c", [True, False], ids=["C", "Python"])


class Layer:
    def forward(self) -> int:
        return 1

    def helper(self) -> int:
        return 2


def other() -> int:
    return 3


@pytest.fixture
def watched(in_c: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[CodeWatch, dict[str, object]]:
    """Return a watch of a class and of some globals, and the globals."""
    if not in_c:
        monkeypatch.setattr(watch, "are_unchanged", None)
    elif watch.are_unchanged is None:
        pytest.skip("the extension is not built")
    names: dict[str, object] = {"limit": 1000.5, "function": other}
    slots = [Slot(f"m:{name}", names, name, value, True) for name, value in names.items()]
    slots += [Slot("m:Layer.forward", Layer, "forward", Layer.forward, True)]
    return CodeWatch(slots), names


@pytest.mark.parametrize(
    "change",
    [
        lambda names, patch: patch.setattr(Layer, "forward", other),
        lambda names, patch: patch.setattr(Layer, "another", other, raising=False),
        lambda names, patch: patch.delattr(Layer, "helper"),
        lambda names, patch: patch.setitem(names, "function", Layer.forward),
        lambda names, patch: patch.setitem(names, "limit", 3),
        lambda names, patch: patch.delitem(names, "limit"),
    ],
    ids=["replaced method", "new method", "lost method", "replaced function", "other value", "lost value"],
)
def test_each_change_is_seen_until_it_is_undone(
    watched: tuple[CodeWatch, dict[str, object]], change: Callable[..., None]
) -> None:
    code, names = watched
    assert code.holds()
    with pytest.MonkeyPatch.context() as patch:
        change(names, patch)
        assert not code.holds()
    assert code.holds()


def test_an_equal_value_is_no_change(watched: tuple[CodeWatch, dict[str, object]]) -> None:
    code, names = watched
    names["limit"] = float("1000.5")
    assert code.holds()
