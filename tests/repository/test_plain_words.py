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
