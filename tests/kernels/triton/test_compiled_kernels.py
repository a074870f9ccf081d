"""Registers, memory and loads of the kernels, by the pinned Triton. No GPU is used: see `compiled.py`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

TABLE = json.loads(Path(__file__).with_name("compiled.json").read_text())
OLDEST = Path(__file__).parents[3] / "constraints/oldest.txt"
OLDEST_TRITON = Path(sys.prefix) / "oldest-triton"
MAX_SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227}
"""KiB of shared memory that a program may have on each card."""
IN_LOOPS = ("attention, splits", "product")
"""Kernels with an inner loop, whose loads must be of 16 bytes."""


def compiled(
    folder: Path, *arguments: str, version: str = triton.__version__, packages: Path | None = None
) -> dict[str, dict[str, list[int]]]:
    """Compile in a process of its own: in this one the kernels belong to the interpreter. `packages` has another Triton
    than this process uses."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
    command = [sys.executable, "-m", "tests.kernels.triton.compiled", *arguments]
    root = Path(__file__).parents[3]
    process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert not process.returncode, process.stderr
    output = json.loads(process.stdout)
    assert output["triton"] == version
    lines: dict[str, dict[str, list[int]]] = output["kernels"]
    return lines


def assert_as_in_table(lines: dict[str, dict[str, list[int]]]) -> None:
    """Another Triton than the pinned one may need other registers; the bars are the same."""
    assert_within_bars(lines)
    for name, cards in lines.items() if triton.__version__ == TABLE["triton"] else ():
        assert cards == {card: TABLE["kernels"][name][card] for card in cards}, name


def assert_within_bars(lines: dict[str, dict[str, list[int]]]) -> None:
    """The rest of the bytes in a loop are a mask's, or scales of 4-bit weights."""
    for name, cards in lines.items():
        for card, (_, spilled, shared, wide) in cards.items():
            assert spilled == 0, (name, card)
            assert shared <= MAX_SHARED[card] << 10, (name, card)
            if name.startswith(IN_LOOPS):
                assert wide >= 90, (name, card)


def test_the_table_is_whole_and_within_bars() -> None:
    assert len(TABLE["kernels"]) == 5 * 15  # shapes, kernels
    assert all(cards.keys() == MAX_SHARED.keys() for cards in TABLE["kernels"].values())
    assert_within_bars(TABLE["kernels"])


def test_kernels_compile_to_the_table(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "90", "--shape", "Llama 3.1 8B")
    assert len(lines) == 15
    assert_as_in_table(lines)


def test_kernels_compile_with_the_oldest_triton(tmp_path: Path) -> None:
    version = re.search(r"^triton==(.*)$", OLDEST.read_text(), re.MULTILINE)
    assert version is not None
    assert OLDEST_TRITON.is_dir(), f"{OLDEST_TRITON} is missing; `make setup` installs Triton {version[1]} there"
    lines = compiled(tmp_path, "90", "--shape", "narrow heads", version=version[1], packages=OLDEST_TRITON)
    assert len(lines) == 14  # no sum of splits
    del lines["attention, splits, narrow heads"]  # loads of less than 16 bytes
    assert_within_bars(lines)


@pytest.mark.slow
def test_narrow_heads_compile(tmp_path: Path) -> None:
    assert len(compiled(tmp_path, "90", "--shape", "narrow heads")) == 14  # no sum of splits


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_cards_and_shapes_compile_to_the_table(tmp_path: Path) -> None:
    lines = compiled(tmp_path)
    assert len(lines) == 5 * 15
    assert_as_in_table(lines)
