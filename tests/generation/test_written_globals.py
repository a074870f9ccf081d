"""Tests that functions which write to globals are found: calls with such functions do not share a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from parallelformers_ng.generation.written_globals import globals_written_by

notes: list[int] = []
counts: Counter[str] = Counter()
ALLOWED = {0: [*range(5, 60)]}
last = 0


def appends(batch: int, ids: torch.Tensor) -> list[int]:
    notes.append(len(ids))
    return ALLOWED[0]


def assigns(batch: int, ids: torch.Tensor) -> list[int]:
    global last
    last = len(ids)
    counts["calls"] += 1
    return ALLOWED[0]


def by_another(batch: int, ids: torch.Tensor) -> list[int]:
    return [token for token in appends(batch, ids) if token]


def reads(batch: int, ids: torch.Tensor) -> list[int]:
    results = {"ids": ALLOWED[0]}
    results["again"] = ALLOWED.get(0, [])
    return sorted(results["again"])


class Noting(LogitsProcessor):
    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        counts.update(["seen"])
        return scores


@pytest.mark.parametrize(
    ("root", "names"),
    [(appends, ["notes"]), (assigns, ["last", "counts"]), (by_another, ["notes"]), (reads, []), (Noting(), ["counts"])],
)
def test_globals_that_are_written_are_found(root: Any, names: list[str]) -> None:
    assert sorted(globals_written_by(root)) == sorted(names)
