"""`benchmarks/gpu.sh` with stand-ins for the programs that it runs, and what it measures, on CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.sh"


def run(folder: Path, stand_in: str, **environment: str) -> tuple[int, str]:
    """The status of the script and its report, where all programs are the stand-in, which is given what they are."""
    for name in ("nvidia-smi", "python"):
        program = folder / name
        program.write_text(f"#!/bin/sh\n{stand_in}\n")
        program.chmod(0o755)
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHON": str(folder / "python")}
    report = folder / "report.txt"
    done = subprocess.run(
        ["bash", str(SCRIPT), str(report)], env=os.environ | own | environment, capture_output=True, text=True
    )
    assert report.read_text() == done.stdout
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "failing", ["", "-m pytest", "speed --shape 8B", "restart", "profile", "nvidia-smi", "import torch", "-m pip"]
)
def test_the_status_tells_the_truth(failing: str, tmp_path: Path) -> None:
    stand_in = f'case "$0 $*" in *"{failing or "nothing"}"*) exit 3;; esac\necho "$*"'
    status, report = run(tmp_path, stand_in, WHEELS=str(tmp_path))
    assert (status != 0) == bool(failing)
    assert ("failed with status 3" in report) == bool(failing)
    assert all(f"== {name}\n" in report for name in ("wheels", "tests", "7-8B", "1B", "restart", "a step"))


def test_a_step_that_hangs_does_not_take_the_others_along(tmp_path: Path) -> None:
    """The time is that of all; whoever comes when it is up is not begun, and that is said."""
    status, report = run(tmp_path, 'case "$*" in *pytest*) exec sleep 60;; esac', SECONDS_IN_ALL="2")
    assert status != 0
    assert "== tests: ended after its" in report
    assert "== 1B: not begun, the time is up" in report


@pytest.mark.parametrize("what", [pytest.param("speed", marks=pytest.mark.slow), "restart", "profile"])
def test_what_is_measured(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PROMPT", 8), ("TOKENS", 3), ("ROUNDS", 1)):
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "copy_bandwidth", lambda device: 1e9)
    results, contestants = tmp_path / "gpu.json", list(gpu.CONTESTANTS)[:2]
    given = [what, "--shape", "tiny", "--device", "cpu", "--batches", "1", "2", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", ["gpu", *given, "--contestants", *contestants])
    gpu.main()
    if what == "profile":
        return
    figures, page = json.loads(results.read_text())["tiny"], results.with_suffix(".md").read_text()
    assert all(f"| {name} |" in page for name in figures)
    if what == "restart":
        assert figures["restart"]["the same tokens"] == 1.0
        return
    assert set(figures) == {"copy bandwidth, GB/s"} | {f"{name}, batch {n}" for name in contestants for n in (1, 2)}
    agree = [values["tokens as the first's"] for name, values in figures.items() if "batch" in name]
    assert agree == [1.0] * 4
