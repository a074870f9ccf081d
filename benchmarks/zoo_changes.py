"""Prints the changes between two coverage tables, as Markdown; nothing if there are none.

    python -m benchmarks.zoo_changes BEFORE.md AFTER.md

The program exits with 1 if a model type has become worse, or is new and its outputs are not equal.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo import ENOUGH

COMPARED = ("class", "policy", "2 ranks", "4 ranks", "compared")
"""Compared columns of the table. The plans of real sizes are not compared, because they change with every release of
transformers."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zoo_changes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("before")
    parser.add_argument("after")
    options = parser.parse_args(arguments)
    before, after = Path(options.before).read_text(), Path(options.after).read_text()
    worse, other = changes(rows(before), rows(after))
    if worse or other:
        print(f"Before: {versions(before)}. After: {versions(after)}.")
    for title, lines in (("Worse", worse), ("Changed", other)):
        if lines:
            print(f"\n## {title}\n\n" + "\n".join(f"- {line}" for line in lines))
    return int(bool(worse))


def rows(table: str) -> dict[str, dict[str, str]]:
    """Return model type → column → cell, of a table that `benchmarks.zoo.coverage` wrote.

    Raises:
        ValueError: the text has no table, or the table is from an interrupted run.
    """
    judged = re.search(r"^- (\d+) of (\d+) model types have been judged$", table, flags=re.MULTILINE)
    if judged and judged[1] != judged[2]:
        raise ValueError(f"the table has {judged[1]} of {judged[2]} model types: its run was cut short")
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    if not lines or lines[0][0] != "model type":
        raise ValueError("this is no coverage table: it has no row that begins with 'model type'")
    head, _line, *cells = lines
    return {row[0]: dict(zip(head, row, strict=True)) for row in cells}


def versions(table: str) -> str:
    match = re.search(r"\((transformers [^)]+)\)", table)
    return match[1] if match else "versions unknown"


def changes(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> tuple[list[str], list[str]]:
    """Return the losses and all other differences, with one line for each model type."""
    worse, other = [], []
    for name in sorted(before | after):
        old, new = before.get(name), after.get(name)
        if new is None:
            other.append(f"`{name}` is gone")
        elif old is None:
            line = f"`{name}` is new: {', '.join(new[column] for column in COMPARED[1:4])} {new['reason']}".strip()
            (other if all(_is_good(cell) for cell in _results(new)) else worse).append(line)
        else:
            parts = [f"{column}: {old[column]} → {new[column]}" for column in COMPARED if old[column] != new[column]]
            if parts:
                lost = any(
                    _is_good(was) and not _is_good(now) for was, now in zip(_results(old), _results(new), strict=True)
                )
                (worse if lost else other).append(f"`{name}` {'; '.join(parts)} {new['reason']}".strip())
    return worse, other


def _results(row: dict[str, str]) -> list[str]:
    return [cell for column, cell in row.items() if column.endswith(" ranks")]


def _is_good(cell: str) -> bool:
    """Return whether outputs are equal and enough is sharded, or the whole model does not run either."""
    return cell == "skipped" or (cell.endswith("%") and float(cell[:-1]) >= 100 * ENOUGH)


if __name__ == "__main__":
    sys.exit(main())
