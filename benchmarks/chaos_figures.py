"""Stores the figures of chaos runs, merges the figures of all runs, and writes the page of results."""

from __future__ import annotations

import fcntl
import json
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import machine


@dataclass(frozen=True)
class Figure:
    """Measured values and their limit.

    Attributes:
        name: name of the figure, with the unit.
        how: aggregation of the values: "sum", "max", "p95" or "p99".
        at_most: limit of the aggregated value.
        values: measured values, one for each event or each run.
    """

    name: str
    how: str
    at_most: float
    values: list[float]

    @property
    def value(self) -> float:
        if self.how == "sum":
            return sum(self.values)
        if self.how == "max" or len(self.values) < 2:
            return max(self.values, default=0.0)
        return statistics.quantiles(self.values, n=100, method="inclusive")[int(self.how[1:]) - 1]

    @property
    def holds(self) -> bool:
        return self.value <= self.at_most


@dataclass
class Run:
    """One run of one suite.

    Attributes:
        suite: name of the suite.
        count: number of repetitions.
        seed: seed of the run.
        seconds: duration in seconds.
        began: start of the run in UTC.
        machine: description of the machine, with the size of /dev/shm.
        figures: figures of the run.
    """

    suite: str
    count: int
    seed: int
    seconds: float
    began: str
    machine: dict[str, Any]
    figures: list[Figure]

    @classmethod
    def of(cls, suite: str, count: int, seed: int, seconds: float, figures: list[Figure]) -> Run:
        """Return a run that has just ended."""
        began = time.strftime("%Y-%m-%d %H:%M", time.gmtime(time.time() - seconds))
        shared = os.statvfs("/dev/shm")
        where = {**machine(), "dev_shm_mb": shared.f_blocks * shared.f_frsize // 1_000_000}
        return cls(suite, count, seed, seconds, began, where, figures)


def remember(run: Run, path: Path) -> None:
    """Add a run to a file of results. Other processes may add runs at the same time."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path.write_text(json.dumps([*map(asdict, recall(path)), asdict(run)], indent=1))


def recall(path: Path) -> list[Run]:
    """Return all runs of a file of results; an empty list if the file does not exist."""
    records = json.loads(path.read_text()) if path.exists() else []
    return [Run(**{**run, "figures": [Figure(**figure) for figure in run["figures"]]}) for run in records]


def merge(runs: Iterable[Run]) -> list[Figure]:
    """Return the figures of several runs of one suite, with the values of all runs together."""
    merged: dict[str, Figure] = {}
    for figure in (figure for run in runs for figure in run.figures):
        previous_figure = merged.get(figure.name)
        values = figure.values if previous_figure is None else previous_figure.values + figure.values
        merged[figure.name] = Figure(figure.name, figure.how, figure.at_most, values)
    return list(merged.values())


def lines(figures: list[Figure]) -> list[str]:
    """Return one line for each figure: name, measured value and limit."""
    return [
        f"  {figure.name:<46}{figure.value:>10.3g}{figure.at_most:>10.3g}{'' if figure.holds else '  missed'}"
        for figure in figures
    ]


def page(runs: list[Run], about: dict[str, tuple[int, str]]) -> str:
    """Return a Markdown page of all runs.

    Args:
        runs: runs in any order.
        about: name of a suite → its full count and its description, in the order of the page.
    """
    text = ["# Chaos: measured figures", ""]
    text += ["`python -m benchmarks.chaos --report` wrote this page."]
    text += ["Each row of the first table covers all runs of the suite in the second table.", ""]
    text += ["| suite | what happens | times | figure | measured | at most |", "| --- | --- | --- | --- | --- | --- |"]
    for suite, (full, what) in about.items():
        mine = [run for run in runs if run.suite == suite]
        count = sum(run.count for run in mine)
        head = f"| {suite} | {what} | {count:,} of {full:,} "
        text += [] if mine else [f"{head}| not measured yet | | |"]
        for figure in merge(mine):
            text.append(f"{head}| {figure.name} | {_short(figure)} | {figure.at_most:g} |")
            head = "| | | "
    text += ["", "| run | times | seed | began (UTC) | seconds | load at its end | machine |", "| --- " * 7 + "|"]
    for run in sorted(runs, key=lambda run: run.began):
        on = run.machine
        versions = f"{on['cpu']}, {on['cores']} cores, Python {on['python']}, torch {on['torch']}"
        versions += f", transformers {on['transformers']}, /dev/shm of {on['dev_shm_mb']} MB"
        text.append(
            f"| {run.suite} | {run.count:,} | {run.seed} | {run.began} | {run.seconds:.0f} | {on['load_1min']:.1f} |"
            f" {versions} |"
        )
    return "\n".join([*text, ""])


def _short(figure: Figure) -> str:
    value = f"{figure.value:.3g}"
    return value if figure.holds else f"**{value}**"
