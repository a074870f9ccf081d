"""Checks for `make quality` that no two classes and no two files of the package have the same name."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path


def mistakes(package: Path) -> list[str]:
    """Return a line for each class name that is defined in two files, and for each file name that two files have,
    beneath `package`."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        file = str(path.relative_to(package))
        if path.name != "__init__.py":
            places[f"file {path.name}"].append(file)
        classes = (node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
        for name in classes:
            places[f"class {name}"].append(file)
    return [f"{name}: {', '.join(files)}" for name, files in places.items() if len(files) > 1]


if __name__ == "__main__":
    sys.exit("\n".join(mistakes(Path("parallelformers_ng"))) or 0)
