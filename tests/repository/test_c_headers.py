"""Tests that the check of C headers finds each kind of mistake, and no mistake in the package."""

from __future__ import annotations

from pathlib import Path

import parallelformers_ng
from tests.repository.c_headers import mistakes


def write(folder: Path, **texts: str) -> None:
    for name, text in texts.items():
        (folder / f"{name}.h").write_text(text)


def test_headers_of_the_package_are_in_order() -> None:
    assert mistakes(Path(parallelformers_ng.__file__).parent) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    write(tmp_path, one='#include "far/two.h"\n', three='/* #include "one.h" */\n#include <math.h>\n')
    write(tmp_path / "far", two='#include "../three.h"\n')
    assert mistakes(tmp_path) == []
    write(tmp_path, three='#  include "one.h"\n')
    (mistake,) = mistakes(tmp_path)
    assert mistake.startswith("a circle: ")
    assert {"one.h", "two.h", "three.h"} == set(mistake.removeprefix("a circle: ").split(" <- "))


def test_an_include_below_code_is_found(tmp_path: Path) -> None:
    write(tmp_path, used="", user='/* Words. */\n#ifdef X\n#include "used.h"\n#endif\nenum { SIDE = 16 };\n')
    assert mistakes(tmp_path) == []
    write(tmp_path, user='enum { SIDE = 16 };\n#include "used.h"\n')
    assert mistakes(tmp_path) == ["user.h: #include \"used.h\" stands below 'enum { SIDE = 16 };'"]
