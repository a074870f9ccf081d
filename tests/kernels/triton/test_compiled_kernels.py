"""Registers, memory and loads of the kernels, by the pinned Triton. No GPU is used: see `compiled.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

TABLE = json.loads(Path(__file__).with_name("compiled.json").read_text())
MOST_SHARED = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90": 227, "sm_100": 227}
"""KiB of shared memory that a program may have on each card."""
IN_LOOPS = ("attention, splits", "product")
"""Kernels with an inner loop, whose loads must be of 16 bytes."""


def compiled(folder: Path, *arguments: str) -> dict[str, dict[str, list[int]]]:
    """Compile in a process of its own: in this one the kernels belong to the interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.kernels.triton.compiled", *arguments]
    root = Path(__file__).parents[3]
    output = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    lines: dict[str, dict[str, list[int]]] = json.loads(output)["kernels"]
    return lines


def assert_as_in_table(lines: dict[str, dict[str, list[int]]]) -> None:
    assert triton.__version__ == TABLE["triton"], "another Triton: write the table anew, see compiled.py"
    for name, cards in lines.items():
        for card, needs in cards.items():
            assert needs == TABLE["kernels"][name][card], f"{name}, {card}"


def test_kernels_spill_nothing_and_load_16_bytes() -> None:
    """The rest of the bytes in a loop are a mask's, or scales of 4-bit weights."""
    lines = [(name, card, needs) for name, cards in TABLE["kernels"].items() for card, needs in cards.items()]
    assert len(lines) == 5 * 5 * 9  # cards, shapes, kernels
    for name, card, needs in lines:
        _, spilled, shared, wide = needs
        assert spilled == 0, (name, card)
        assert shared <= MOST_SHARED[card] << 10, (name, card)
        if name.startswith(IN_LOOPS):
            assert wide >= 90, (name, card)


def test_kernels_compile_to_the_table(tmp_path: Path) -> None:
    lines = compiled(tmp_path, "90", "--shape", "Llama 3.1 8B")
    assert len(lines) == 9
    assert_as_in_table(lines)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_cards_and_shapes_compile_to_the_table(tmp_path: Path) -> None:
    lines = compiled(tmp_path)
    assert len(lines) == 5 * 9
    assert_as_in_table(lines)
