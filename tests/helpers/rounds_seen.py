"""Records the rounds of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from parallelformers_ng.batching import scheduler
from parallelformers_ng.model.remote_module import remote_of


def rows_of_each_round(model: Any) -> list[int]:
    """Return a list that gets the number of rows of each later round, until the workers restart."""
    (shared,), counts = remote_of(model).calls.shared.values(), [0]
    batch = shared.batch
    next_round = batch.next_round

    def counting() -> Any:
        request = next_round()
        counts.append(len(batch._running))
        return request

    batch.next_round = counting  # type: ignore[method-assign]
    return counts


def use_short_pieces(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Make batches run at most `tokens` prompt tokens in a round, whatever the speed of the ranks is."""
    monkeypatch.setattr(scheduler, "_FIRST_CHUNK", tokens)
    monkeypatch.setattr(scheduler, "_WIDEST_CHUNK", {"cpu": tokens, "cuda": tokens})
