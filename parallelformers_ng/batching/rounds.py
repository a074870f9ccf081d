"""A round of decoding: who joins and leaves, then a few steps of all rows. One request to the ranks, and its answer.

Between rounds the ranks serve whatever else is asked of them, in turn; the rows wait, with their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.batching.captured_rows import CapturedRows
from parallelformers_ng.batching.prefixes import Prefixes
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import Prompts
from parallelformers_ng.batching.row import ENDED, FAILED, BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.generation.lockstep import OwnStream
from parallelformers_ng.generation.object_state import ObjectState, stateful_arguments
from parallelformers_ng.runtime.failures import Description, describe
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.wire.message import parcel

_PIECES_AT_ONCE = 2
"""If no row waits for its next token: long pieces cost less a token than short ones."""


@dataclass
class Round:
    """The orders of a round, for the ranks.

    Attributes:
        batch: number of the batch; rows of an earlier one are forgotten.
        joins: number of a row → a parcel with its `Call` of `generate`, and the seed of its random stream or None.
        leaves: rows that nobody waits for any more.
        piece: tokens of prompts that are run between two steps; 0 for whole prompts, one by one.
        prefixes: tokens of earlier sequences that are kept for prompts that begin alike, at most.
        steps: tokens that are chosen at most for each row.
        adapters: adapters of all rows, None if the model has none.
        positions: rows × tokens of the largest cache over which steps become CUDA graphs; 0 if none do.
    """

    batch: int
    joins: dict[int, tuple[bytes, int, int | None]]
    leaves: list[int]
    piece: int
    prefixes: int
    steps: int
    adapters: ActiveAdapters | None = None
    positions: int = 0


@dataclass
class News:
    """The fate of the rows in a round, as one rank knows it.

    Attributes:
        tokens: number of a row → its new tokens.
        ended: rows that are complete.
        failed: rows that ended, and why where this rank raised it: all ranks do for arguments that are refused, one for
            what its processors raise.
        states: number of a row → a parcel with new states of the caller's objects, on the rank that chooses for it.
        token_bytes: bytes of one token's keys and values on this rank; 0 if no row runs.
        free_bytes: free bytes of the rank's own device; 0 if that is the host.
        uncaptured: why steps became no CUDA graphs that should, "" if they did.
    """

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    failed: dict[int, Description | None] = field(default_factory=dict)
    states: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    token_bytes: int = 0
    free_bytes: int = 0
    uncaptured: str = ""


class RankBatch:
    """The rows of one rank, and the rounds that it runs.

    Args:
        model: the rank's.
        communicator: the ranks.
        steps: gives those that are recorded, or says why none can be.
    """

    def __init__(self, model: Any, communicator: Communicator, steps: Callable[[], CapturedSteps | str]) -> None:
        self._model = model
        self._communicator = communicator
        self._captured = CapturedRows(model, steps)
        self._batch = -1

    def forget_prefixes(self) -> None:
        """Let go of earlier sequences, and keep none that was begun already: the model is not what it was."""
        if self._batch >= 0:
            self._prefixes.forget()
            for row in (*self._rows, *self._prompts):
                row.may_be_kept = False

    def run(self, order: Round, calls: Mapping[int, dict[str, Any] | Description]) -> News:
        """Run a round.

        Args:
            calls: number of a row that joins → arguments of its `generate`, or why they could not be read.

        Raises:
            Exception: the forward failed; then no row of the batch can go on.
        """
        if order.batch != self._batch:
            self._batch, self._prefixes = order.batch, Prefixes(order.prefixes)
            self._rows = Rows(self._model, self._communicator, self._prefixes, self._captured)
            self._prompts = Prompts(self._model, self._prefixes)
        self._rows.leave(order.leaves)
        self._prompts.leave(order.leaves)
        news, met = News(), set[BatchRow]()
        for number, (*_, seed) in order.joins.items():
            kwargs = calls[number]
            if isinstance(kwargs, Description):
                news.failed[number] = kwargs
                continue
            objects = ObjectState(stateful_arguments(kwargs))
            try:
                call = prepare(self._model, kwargs)
            except Exception as error:  # of its arguments, alike on every rank
                news.failed[number] = describe(error)
                continue
            stream = None if seed is None else OwnStream(seed, self._model.device)
            self._prompts.add(BatchRow(number, call, stream, objects if objects.parts else None))
        piece = order.piece if len(self._rows) else order.piece * _PIECES_AT_ONCE
        if len(self._prompts) and (ran := self._prompts.run(piece)):
            self._rows.join(ran.rows, ran.logits, ran.cache, ran.mask)
            met.update(ran.rows)
        for _ in range(order.steps):
            if not len(self._rows):
                break
            met.update(self._rows.step(order.positions))
        news.uncaptured = self._captured.reason
        news.token_bytes = self._rows.token_bytes
        if self._model.device.type == "cuda":
            news.free_bytes = torch.cuda.mem_get_info(self._model.device)[0]
        for row in met:
            news.tokens[row.number] = row.news()
            if row.outcome == ENDED:
                news.ended.append(row.number)
            elif row.outcome == FAILED:
                news.failed[row.number] = row.failure
            if changes := row.changes():
                news.states[row.number] = parcel(changes)
        return news
