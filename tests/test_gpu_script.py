"""The exit status of `benchmarks/gpu.sh`, with stand-ins for the programs that it runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"


@pytest.mark.parametrize("failing", ["", "pytest", "benchmarks.gpu", "nvidia-smi", "import torch"])
def test_the_status_tells_the_truth(failing: str, tmp_path: Path) -> None:
    for name in ("nvidia-smi", "python"):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\ncase "$0 $*" in *"{failing or "nothing"}"*) exit 3;; esac\necho "$*"\n')
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    report = tmp_path / "report.txt"
    done = subprocess.run(["bash", str(SCRIPT), str(report)], env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) == bool(failing)
    assert report.read_text() == done.stdout
