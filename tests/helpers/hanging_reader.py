"""Provides a runner whose rank 1 hangs when it reads a checkpoint file. Only ranks import the module."""

from __future__ import annotations

import time
from typing import Any

import torch

from parallelformers_ng.checkpoint.files import FileLeaf
from parallelformers_ng.worker.runner import ModelRunner


class HangingReader(ModelRunner):
    def __init__(self, rank: int, *args: Any) -> None:
        super().__init__(rank, *args)
        if rank == 1:
            FileLeaf.tensor = _never_ending  # type: ignore[method-assign]


def _never_ending(leaf: FileLeaf) -> torch.Tensor:
    time.sleep(60)
    raise AssertionError("the test took longer than the read")
