"""Runs wrong command lines, in one separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_CODE = """
import contextlib, io, json, sys
from parallelformers_ng.cli.commands import main
results = []
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as text:
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    results.append([status, text.getvalue(), "torch" in sys.modules])
print(json.dumps(results))
"""


def ended(commands: list[list[str]], folder: Path) -> list[tuple[int, str, bool]]:
    """Return for each command line its exit status, its words on standard error, and whether torch is imported."""
    run = [sys.executable, "-c", _CODE]
    done = subprocess.run(run, input=json.dumps(commands), capture_output=True, text=True, cwd=folder, check=True)
    return [tuple(result) for result in json.loads(done.stdout)]
