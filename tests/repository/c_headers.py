"""Checks for `make quality` that C headers include each other in no circle, and include all headers that they use at
their top."""

from __future__ import annotations

import re
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_INCLUDE = re.compile(r'#\s*include\s*"([^"]+)"')


def mistakes(folder: Path) -> list[str]:
    """Return a line for each mistake in the C files beneath a folder; includes of system headers are skipped."""
    lines: list[str] = []
    graph: dict[Path, list[Path]] = {}
    for path in sorted([*folder.rglob("*.h"), *folder.rglob("*.c")]):
        included = graph[path.resolve()] = []
        code_before = ""
        for line in filter(None, map(str.strip, _COMMENTS.sub("", path.read_text()).splitlines())):
            if include := _INCLUDE.match(line):
                included.append((path.parent / include[1]).resolve())
                if code_before:  # the header may depend on this code without including it
                    lines.append(f'{path.relative_to(folder)}: #include "{include[1]}" stands below {code_before!r}')
            elif not line.startswith("#"):
                code_before = code_before or line
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        lines.append(f"a circle: {' <- '.join(path.name for path in error.args[1])}")
    return lines


if __name__ == "__main__":
    sys.exit("\n".join(mistakes(Path("parallelformers_ng"))) or 0)
