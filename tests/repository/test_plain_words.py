"""Tests that the check of prose finds a place of each kind, and finds nothing in plain text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repository.plain_words import CEILINGS, hits

PLACES = {
    "fragment": '"""Of the model."""\n',
    "riddle": "# The rank, which knows what the others hold, is told by those that wait for it at the end.\n",
    "long": f"# {'word ' * 35}\n",
    "where": "# It is the default, where there is one.\n",
    "variable": "found = 1\n",
    "private": "most_rows = 1\n",
}


@pytest.mark.parametrize("kind", CEILINGS)
def test_each_kind_is_found(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(PLACES[kind])
    assert [seen for seen, _ in hits(file)] == [kind]


def test_descriptions_and_pages_are_read(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        'def f(a):\n    """Return a.\n\n    Args:\n        a: where it lies.\n    """\n'
    )
    assert ("fragment", "where it lies.") in hits(tmp_path / "module.py")
    (tmp_path / "page.md").write_text("Weights of `where` are replicated.\n\n```\nwhere there is none\n```\n")
    assert [*hits(tmp_path / "page.md")] == []


@pytest.mark.parametrize(
    ("name", "text", "places"),
    [
        ("module.py", "class News: ...\n", ["News: write RoundOutput"]),
        ("module.py", "_LEAST_ROWS = 1\n", ["_LEAST_ROWS: write _MIN_ROWS"]),
        ("module.py", "count.most_common()\n", []),
        ("module.py", "words = 1\n", []),
        ("parallelformers_ng/batching/sharing.py", "words = 1\n", ["words: write vocab_size"]),
        (
            "page.md",
            "Good news of `Kept.let_go`.\n",
            ["Kept: write RankState", "let_go: write evict, invalidate or resume"],
        ),
    ],
)
def test_private_words_are_refused(tmp_path: Path, name: str, text: str, places: list[str]) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    assert [*hits(file)] == [("private", place) for place in places]
