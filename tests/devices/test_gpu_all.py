"""Tests `benchmarks/gpu_all.py`: the order, the limits and the complaints of its parts."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_all
from benchmarks.gpu_all import Part


def measure(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_all", "--large", "tiny", "--small", "tiny", "--device", "cpu", *words])
    gpu_all.main()


def test_slow_part_is_interrupted_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sleeps(options: Namespace) -> list[str]:
        time.sleep(60)
        return []

    def fails(options: Namespace) -> list[str]:
        raise ValueError("no such thing")

    parts = {"slow": Part(1, True, sleeps, {}), "broken": Part(9, True, fails, {})}
    parts["right"] = Part(9, False, lambda options: [f"said of {options.shape}, {options.batches}"], {"batches": [3]})
    monkeypatch.setattr(gpu_all, "PARTS", parts)
    with pytest.raises(SystemExit) as wrong:
        measure(monkeypatch)
    assert wrong.value.code == (
        "WRONG: slow: OutOfTimeError: \nWRONG: broken: ValueError: no such thing\nWRONG: said of tiny, [3]"
    )
    printed = capsys.readouterr()
    assert "time.sleep(60)" in printed.err
    assert "== right: " in printed.out


def test_part_that_survives_errors_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next measurement would have no time limit."""

    def survives(options: Namespace) -> list[str]:
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)
        return []

    monkeypatch.setattr(gpu_all, "PARTS", {"slow": Part(1, True, survives, {})})
    with pytest.raises(SystemExit, match="WRONG: slow: OutOfTimeError"):
        measure(monkeypatch)


def test_parts_after_the_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_all, "PARTS", {"late": Part(9, True, lambda options: [], {})})
    with pytest.raises(SystemExit, match="late: not begun, the time is up"):
        measure(monkeypatch, "--seconds", "-1")


def test_parts_are_chosen_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "gpu.json"
    measure(monkeypatch, "restart", "--json", str(results))
    figures: dict[str, Any] = json.loads(results.read_text())["tiny"]
    assert figures["restart"]["the same tokens"] == 1.0
    with pytest.raises(SystemExit):
        measure(monkeypatch, "nothing")
    assert "unknown parts: nothing; there are speed, callers" in capsys.readouterr().err
