"""A round of decoding: who joins and leaves, then a few steps of all rows. One request to the ranks, and its answer.

Between rounds the ranks serve whatever else is asked of them, in turn; the rows wait, with their caches.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.rows import Row, Rows
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import DivergedError
from parallelformers_ng.runtime.failures import Description, describe

STEPS = 4
"""Tokens for each row in one round: so long waits who comes next. To ask the ranks takes a fifth of a millisecond."""


@dataclass
class Round:
    """What the ranks are asked to do.

    Attributes:
        batch: number of the batch; rows of an earlier one are forgotten.
        joins: number of a row → arguments of its `generate`, and the seed of its random stream or None.
        leaves: rows that nobody waits for any more.
    """

    batch: int
    joins: dict[int, tuple[dict[str, Any], int | None]]
    leaves: list[int]


@dataclass
class News:
    """What has become of the rows.

    Attributes:
        tokens: number of a row → its new tokens.
        ended: rows that are complete.
        failed: rows that did not come in, and why.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    failed: dict[int, Description] = field(default_factory=dict)


class RankBatch:
    """The rows of one rank, and the rounds that it runs.

    Args:
        model: the rank's.
        communicator: the ranks.
    """

    def __init__(self, model: Any, communicator: Communicator) -> None:
        self._model = model
        self._communicator = communicator
        self._batch = -1
        self._rows = Rows(model)

    def run(self, asked: Round) -> News:
        """Raises what a forward raises: then no row of the batch can go on.

        Raises:
            DivergedError: the ranks chose different tokens.
        """
        if asked.batch != self._batch:
            self._batch, self._rows = asked.batch, Rows(self._model)
        self._rows.leave(asked.leaves)
        news, met = News(), dict[int, Row]()
        for number, (kwargs, seed) in asked.joins.items():
            try:
                call = prepare(self._model, kwargs)
            except Exception as error:  # of its arguments, alike on every rank
                news.failed[number] = describe(error)
                continue
            met[number] = self._rows.join(number, call, None if seed is None else _stream(seed))
        for _ in range(STEPS):
            if not len(self._rows):
                break
            met |= {row.number: row for row in self._rows.step()}
        news.tokens = {number: row.news() for number, row in met.items()}
        news.ended = [number for number, row in met.items() if row.ended]
        self._agree(news.tokens)
        return news

    def _agree(self, tokens: dict[int, list[int]]) -> None:
        """All ranks have chosen the same tokens, or the answer is worth nothing."""
        mine = torch.tensor([zlib.crc32(repr(tokens).encode())])
        if len(set(self._communicator.all_gather(mine).tolist())) > 1:
            raise DivergedError("the ranks chose different tokens; the answers were discarded")


def _stream(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()
