"""Plants one fault at a time in a copy of the tree, and says whether `make test` finds it.

python -m tests.repository.planted_faults [NAME …]     the faults of planted_faults.toml, or those with these names

A fault is found if a test fails. The tests that are most likely to fail run first; if they pass, all tests with the
mark `quick` run. Exit status 1 means that a fault was not found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FAULTS = tomllib.loads((Path(__file__).parent / "planted_faults.toml").read_text())


def plant(tree: Path, fault: dict[str, Any]) -> None:
    file = tree / "parallelformers_ng" / fault["file"]
    text = file.read_text()
    count = text.count(fault["old"])
    if count != 1:
        sys.exit(f"{file.relative_to(tree)}: {fault['old']!r} must stand there once, not {count} times")
    file.write_text(text.replace(fault["old"], fault["new"]))
    if file.suffix in (".c", ".h"):
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)


def failed_test(tree: Path, arguments: list[str]) -> str:
    """The first test that fails in the tree; empty if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "quick", "-p", "no:cacheprovider", *arguments]
    ran = subprocess.run(
        command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )
    if ran.returncode == 0:
        return ""
    failures = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED tests", "ERROR tests"))]
    return failures[0].split(" - ")[0] if failures else ran.stdout[-300:] + ran.stderr[-300:]


def copy_of_the_tree(folder: str) -> Path:
    left_out = shutil.ignore_patterns(".venv*", ".git", "*_cache", "__pycache__", "site", "dist", "build")
    return Path(shutil.copytree(ROOT, Path(folder) / "tree", ignore=left_out))


def main(names: list[str]) -> int:
    missed = []
    for name, fault in FAULTS.items():
        if names and name not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            tree = copy_of_the_tree(folder)
            plant(tree, fault)
            failure = failed_test(tree, fault["tests"]) or failed_test(tree, ["-n", "2", "--dist", "loadfile"])
        print(f"{name:28s} {failure or 'NOT FOUND'}", flush=True)
        missed += [] if failure else [name]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
