"""Tests that the check of names finds every name that is defined twice, and no such name in the package."""

from __future__ import annotations

from pathlib import Path

import parallelformers_ng
from tests.repository.unique_names import mistakes


def test_names_of_the_package_are_unique() -> None:
    assert mistakes(Path(parallelformers_ng.__file__).parent) == []


def test_shared_names_are_found(tmp_path: Path) -> None:
    for room, text in (("far", "class Row: ...\n"), ("near", "def make():\n    class Row: ...\n")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
        (tmp_path / room / "rows.py").write_text(text)
    assert mistakes(tmp_path) == ["file rows.py: far/rows.py, near/rows.py", "class Row: far/rows.py, near/rows.py"]
    (tmp_path / "near" / "rows.py").rename(tmp_path / "near" / "making.py")
    assert mistakes(tmp_path) == ["class Row: far/rows.py, near/making.py"]
