"""Reads `quick.txt`, the table of the tests that `make test` runs."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def quick_tests() -> set[str]:
    """Return the folders, files, tests and cases of the table."""
    lines = (TESTS / "quick.txt").read_text().splitlines()
    return {line for line in lines if line and not line.startswith("#")}
