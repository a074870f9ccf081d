"""Tests that functions given to `generate` cause one warning if they write to globals, and that all other changes
return."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from parallelformers_ng import parallelize
from parallelformers_ng.generation.lost_notes import globals_written_by
from tests.strangers.agreement import prompt
from tests.zoo.decoders import decoder

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


@pytest.mark.parametrize("batching", [True, False])
def test_lost_notes_are_said_once(groups, caplog: pytest.LogCaptureFixture, batching: bool) -> None:
    cut = parallelize(decoder("Llama"), workers=groups(2), batching=batching)
    caplog.set_level(logging.WARNING, "parallelformers_ng")
    options = {"max_new_tokens": 2, "do_sample": False}
    processor, kept = Noting(), list[int]()

    def in_a_closure(batch: int, ids: torch.Tensor) -> list[int]:
        kept.append(len(ids))
        return ALLOWED[0]

    cut.generate(prompt(5), **options, prefix_allowed_tokens_fn=in_a_closure)
    cut.generate(prompt(5), **options, prefix_allowed_tokens_fn=reads)
    assert kept == [5, 6]
    assert not caplog.records
    for _ in range(2):
        cut.generate(prompt(5), **options, prefix_allowed_tokens_fn=appends)
        cut.generate(prompt(5), **options, logits_processor=[processor])
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "values that appends writes to the global notes stay on the workers" in told[0]
    assert "values that Noting writes to the global counts stay on the workers" in told[1]
    assert processor.seen == 4
    cut.deparallelize()
