"""Tests that a program may end while a model is tested for batching."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading, time
threading.stack_size(131072)
from parallelformers_ng.batching.batch_proof import Trial
from tests.zoo.decoders import decoder
model = decoder("Llama")
Trial(at_once=False).why_alone(type(model), model.config)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.1, 0.2, 0.4])
def test_program_ends_during_the_proof(seconds: float) -> None:
    command = [sys.executable, "-c", PROGRAM, str(seconds)]
    end = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False
    )
    assert (end.returncode, end.stderr) == (0, "")
