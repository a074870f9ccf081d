"""Compares docs/contract.md with the tests: each promise names its test files, and each marked file names its promise."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"pytest\.mark\.promise\(\"([a-z-]+)\"\)")


def anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def test_each_promise_names_the_files_that_are_marked_with_it() -> None:
    sections = dict(SECTION.findall((ROOT / "docs/contract.md").read_text()))
    named = {
        (anchor(heading), file) for heading, text in sections.items() for file in re.findall(r"`(tests/[^`]+\.py)`", text)
    }
    marked = {
        (promise, str(file.relative_to(ROOT)))
        for file in (ROOT / "tests").rglob("test_*.py")
        for promise in MARK.findall(file.read_text())
    }
    assert named == marked
    assert {promise for promise, _ in named} == set(map(anchor, sections))
