"""Provides functions of a user that hang on ranks. The module imports little, because ranks import it, too."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch


def hook(module: torch.nn.Module, args: Any) -> None:
    if next(layer.communicator.rank for layer in module.modules() if hasattr(layer, "communicator")) == 1:
        time.sleep(60)  # in hook


def endless(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    time.sleep(60)  # in endless
    return scores


def place_of_sleep(function: str) -> str:
    """Return the text that names the line of this file at which a function hangs."""
    lines = [line.strip() for line in Path(__file__).read_text().splitlines()]
    return f"{__file__}, line {lines.index(f'time.sleep(60)  # in {function}') + 1}, in {function}\n"
