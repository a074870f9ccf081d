"""Tests that names of tests are short enough to be read in a list."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
MAX_WORDS = 8


def test_names_of_tests_have_at_most_eight_words() -> None:
    too_long = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                words = node.name.removeprefix("test_").split("_")
                if len(words) > MAX_WORDS:
                    too_long.append(f"{path.relative_to(TESTS)}:{node.lineno}: {node.name} has {len(words)} words")
    assert too_long == []
