"""Counts lines of code: no blank lines, no comments, no docstrings.

python -m tests.repository.lines [FOLDER …]     lines of each folder of the package and of the policies, and their sum
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_C_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def lines_of_python(text: str) -> int:
    """Count the lines with code; a string that stands as a statement is a docstring, and does not count."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def lines_of_c(text: str) -> int:
    """Count the lines with more than a comment."""
    return sum(1 for line in _C_COMMENT.sub("", text).splitlines() if line.strip())


def count(folders: list[Path]) -> Counter[str]:
    """Count the lines of code of every Python and C file below each folder: room → lines."""
    rooms = Counter[str]()
    for folder in folders:
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".c", ".h"):
                counted = lines_of_python if file.suffix == ".py" else lines_of_c
                rooms[str(file.parent.relative_to(ROOT))] += counted(file.read_text())
    return rooms


def main(folders: list[str]) -> None:
    rooms = count([ROOT / folder for folder in folders or ("parallelformers_ng", "policies")])
    for room, lines in rooms.most_common():
        print(f"{lines:7,} {room}")
    print(f"{rooms.total():7,} in all")


if __name__ == "__main__":
    main(sys.argv[1:])
