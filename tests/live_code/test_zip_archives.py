"""Tests that code of a zip archive that was deleted or replaced is sent by value."""

from __future__ import annotations

import importlib
import sys
import zipfile
from pathlib import Path

import pytest

from parallelformers_ng.live_code.changes import is_by_value


@pytest.mark.parametrize("name", ["of_an_archive", "package_of_an_archive.inside"])
@pytest.mark.parametrize("left", [None, b"", b"not an archive"])
def test_code_of_missing_archives_is_sent_by_value(
    name: str, left: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "code.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in ("of_an_archive.py", "package_of_an_archive/__init__.py", "package_of_an_archive/inside.py"):
            archive.writestr(file, "NUMBER = 1\n")
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    importlib.import_module(name)
    assert not is_by_value(name)
    if left is None:
        path.unlink()
    else:
        path.write_bytes(left)
    assert is_by_value(name)
