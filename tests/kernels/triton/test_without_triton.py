"""Processes that need no Triton import none of its kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallelformers_ng.kernels import device_layer
from parallelformers_ng.kernels.triton import byte_product, nibble_product, norm_kernel

WORKER = """
import sys
{before}
import parallelformers_ng.worker.imports
from parallelformers_ng.worker.runner import ModelRunner
print(sorted(name for name in sys.modules if name.startswith("parallelformers_ng.kernels.triton")))
"""


@pytest.mark.parametrize("before", ["", "sys.modules['triton'] = None"], ids=["installed", "missing"])
def test_a_worker_imports_no_kernels(before: str) -> None:
    command = [sys.executable, "-c", WORKER.format(before=before)]
    output = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"


def test_limits_are_those_of_the_kernels() -> None:
    """They are written down twice: the layers are read where Triton may be missing."""
    assert device_layer.MAX_COLUMNS == norm_kernel.MAX_COLUMNS
    assert device_layer._MAX_ROWS == byte_product.MAX_ROWS
    assert device_layer._GROUP == nibble_product.GROUP
