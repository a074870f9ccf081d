"""Reads `measured.toml`: decode steps of one rank that were measured on a card, without sums between ranks."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class MeasuredStep:
    """A measurement of one rank's decode steps, and the planner's own figure for it, in steps per second."""

    device: str
    ranks: int
    weights: str  # data type, or scheme of quantization
    rows: int
    measured: float
    computed: float

    def __str__(self) -> str:
        figures = f"{self.measured:.0f} steps/s, computed {self.computed:.0f}"
        return f"one rank of {self.ranks}, 8B shape, {self.weights}, {self.rows} rows: {figures}"


TEXT = files("parallelformers_ng.planner").joinpath("measured.toml").read_text("utf-8")
MEASURED = [MeasuredStep(**step) for step in tomllib.loads(TEXT)["step"]]


def measured_step(device: str, ranks: int, weights: str, rows: int) -> MeasuredStep | None:
    """Return the measurement with the most rows that are not more than `rows`; None without one."""
    fitting = [
        step
        for step in MEASURED
        if (step.device, step.ranks, step.weights) == (device, ranks, weights) and step.rows <= rows
    ]
    return max(fitting, key=lambda step: step.rows, default=None)
