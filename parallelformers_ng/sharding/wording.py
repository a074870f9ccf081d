"""Formats names and sizes of tensors for people."""

from __future__ import annotations

import re


def pattern_of(name: str) -> str:
    """Return a tensor's name with `*` for layer numbers, so that tensors of the same kind share one name."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def human_bytes(count: float) -> str:
    """Return bytes as a short text in decimal units, as disks and Parallelformers' tables count: `2.72 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
