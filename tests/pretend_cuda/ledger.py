"""Counts transfers and waits between host and device, by place in the code."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch

_OWN, _TORCH = str(Path(__file__).parent), str(Path(torch.__file__).parent)

TO_DEVICE, TO_HOST, WAITS = "copies to the device", "copies to the host", "waits of the host"
PAGEABLE = "copies from pageable memory"
LAUNCHES = "launches"


class Ledger:
    """Counts by kind and place: `entries[TO_HOST, "runner.py:120 copy_"]`.

    Attributes:
        launched: number of operators that have run on a device.
        waits: for each wait for an event, the number of operators launched after it, and all counts at that time.
    """

    def __init__(self) -> None:
        self.entries: Counter[tuple[str, str]] = Counter()
        self.launched = 0
        self.waits: list[tuple[int, Counter[str]]] = []

    def note(self, kind: str, what: str) -> None:
        self.entries[kind, f"{_place()} {what}"] += 1

    def wait(self, launched: int) -> None:
        """Record that the host waits for an event.

        Args:
            launched: value of `launched` when the event was recorded.
        """
        self.note(WAITS, "Event.synchronize")
        counts = totals(self.entries) + Counter({LAUNCHES: self.launched})
        self.waits.append((self.launched - launched, counts))

    def take(self) -> dict[str, dict[str, int]]:
        """Return the counts since the last call: kind → place → number."""
        taken: dict[str, dict[str, int]] = {TO_DEVICE: {}, TO_HOST: {}, WAITS: {}, PAGEABLE: {}}
        for (kind, place), count in self.entries.items():
            taken[kind][place] = count
        self.entries.clear()
        return taken


def totals(entries: Counter[tuple[str, str]]) -> Counter[str]:
    """Return the counts by kind."""
    counts = Counter[str]()
    for (kind, _), count in entries.items():
        counts[kind] += count
    return counts


def _place() -> str:
    """Return the innermost line outside torch and this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_OWN, _TORCH, "<")):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


ledger = Ledger()
