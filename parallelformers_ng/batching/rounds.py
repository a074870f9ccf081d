"""Runs rounds of a batch on a rank. In a round, rows join and leave, and then all rows decode a few steps.

A round is one request to the ranks. Between rounds the ranks serve other requests, and the rows keep their caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import PrefillOutput, Prompts, is_causal, rows_of
from parallelformers_ng.batching.row import ENDED, FAILED, BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.batching.slots import CapturedRows
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.generation.lockstep import OwnStream
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.runtime.failures import Description, describe
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.wire.message import parcel, unpack


@dataclass
class Round:
    """The caller's instructions to the ranks for one round."""

    batch: int  # number of the batch; ranks drop the rows of an earlier batch
    # Number of a new row → `message.parcel` of its call of `generate`, and the seed of its random stream or None.
    joins: dict[int, tuple[bytes, int, int | None]]
    leaves: list[int]  # numbers of rows whose callers stopped waiting
    chunk: int  # most prompt tokens in the round if rows wait for their next tokens; 0 for one whole prompt
    # Most prompt tokens in the round if no row waits for its next token. Prompts of this length or longer run in one
    # round and join in the next, because other rows would wait too long for both.
    widest: int
    prefixes: int  # most tokens in the prefix cache
    steps: int  # number of decode steps; the round runs at most one while prompts wait
    adapters: ActiveAdapters | None = None  # active adapters of all rows; None for a model without adapters
    positions: int = 0  # most rows × tokens of a cache whose steps become CUDA graphs; 0 for no CUDA graphs
    max_rows: int = 1  # most rows of the batch
    # Number of a row → `message.parcel` of the changes that the caller's other threads made to its processors and
    # criteria.
    updates: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"round of batch {self.batch}: rows {[*self.joins]} join, {self.leaves} leave, {self.steps} steps"


@dataclass
class RoundOutput:
    """One rank's report of a round."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # number of a row → its new tokens
    ended: list[int] = field(default_factory=list)  # numbers of rows that have ended without an error
    # Number of a failed row → the error, or None if another rank raised the error. All ranks raise errors of
    # arguments; only the rank that chooses the row's tokens raises errors of processors.
    failed: dict[int, Description | None] = field(default_factory=dict)
    # Number of a row → `message.parcel` of the new states of its processors and criteria; only from the rank that
    # chooses the row's tokens.
    states: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    prompt_tokens: int = 0  # number of prompt tokens that ran, padding included
    # Number of the last prompt's first tokens that did not run in this round, because the cache had their keys and
    # values.
    prompt_begin: int = 0
    prompt_seconds: float = 0.0  # seconds that this rank took to run the prompt tokens, or to join rows
    token_bytes: int = 0  # bytes of one token's keys and values on this rank; 0 if no row runs
    free_bytes: int = 0  # free bytes of the rank's CUDA device; 0 on CPU
    uncaptured: str = ""  # reason why steps could not become CUDA graphs; "" without such a failure


class RankBatch:
    """The batch of one rank."""

    def __init__(self, model: Any, communicator: Communicator, steps: Callable[[], CapturedSteps | str]) -> None:
        self._model = model
        self._communicator = communicator
        self._captured = CapturedRows(model, steps)
        self._batch = -1
        self._late: list[PrefillOutput] = []  # prompts that have run and join the batch in the next round

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and keep no current row in it later, because the model has changed."""
        if self._batch >= 0:
            self._prefixes.forget()
            self._prompts.is_causal = is_causal(self._model)
            for row in (*self._rows, *self._prompts, *rows_of(self._late)):
                row.may_be_kept = False

    def run(self, order: Round, calls: Mapping[int, tuple[dict[str, Any], ObjectState] | Description]) -> RoundOutput:
        """Run a round. `calls` has the arguments of each new row with their mutable objects; or an error, if the
        arguments could not be unpickled.

        If the forward pass fails, all rows of the batch are lost.
        """
        if order.batch != self._batch:
            self._batch, self._prefixes = order.batch, PrefixCache(order.prefixes)
            self._rows = Rows(self._model, self._communicator, self._prefixes, self._captured)
            self._prompts, self._late = Prompts(self._model, self._prefixes), []
        output, changed_rows = RoundOutput(), set[BatchRow]()
        began, late, self._late = time.monotonic(), self._late, []
        if late:
            changed_rows.update(self._rows.join(late))
            output.prompt_seconds = time.monotonic() - began
        self._rows.leave(order.leaves)
        self._prompts.leave(order.leaves)
        for number, (*_, seed) in order.joins.items():
            joining = calls[number]
            if isinstance(joining, Description):
                output.failed[number] = joining
                continue
            kwargs, objects = joining
            try:
                call = prepare(self._model, kwargs)
            except Exception as error:  # wrong arguments raise the same error on every rank
                output.failed[number] = describe(error)
                continue
            stream = None if seed is None else OwnStream(seed, self._model.device)
            self._prompts.add(BatchRow(number, call, stream, objects))

        if order.updates:
            for row in (*self._rows, *self._prompts, *rows_of(late)):
                if row.number in order.updates:
                    row.objects.restore(unpack(*order.updates[row.number], self._model.device), wins=True)

        def step() -> None:
            changed_rows.update(self._rows.run(1, order.positions, order.max_rows))

        ran_beside, had_rows = False, len(self._rows) > 0
        if len(self._prompts) and not late:
            began = time.monotonic()
            results = self._prompts.run(order.chunk, step) if had_rows else self._prompts.run(order.widest)
            output.prompt_tokens, output.prompt_seconds = self._prompts.latest, time.monotonic() - began
            output.prompt_begin, ran_beside = self._prompts.latest_begin, self._prompts.ran_beside
            if had_rows and 0 < order.widest <= sum(prefill.mask.numel() for prefill in results):
                self._late = results
            elif results:
                changed_rows.update(self._rows.join(results))
        # While prompts wait, at most one step runs, because more rows will share the later steps.
        steps = (int(had_rows) if len(self._prompts) else order.steps) - ran_beside
        changed_rows.update(self._rows.run(steps, order.positions, order.max_rows))
        output.uncaptured = self._captured.reason
        output.token_bytes = self._rows.token_bytes
        if self._model.device.type == "cuda":
            output.free_bytes = torch.cuda.mem_get_info(self._model.device)[0]
            if not self._rows.is_ahead:  # while a step is in flight, `Newest.give` checks the token ids
                look_ups.check()
        for row in changed_rows:
            if row.number in order.leaves:  # the caller has given up this row, which just joined
                continue
            output.tokens[row.number] = row.take_new_tokens()
            if row.outcome == ENDED:
                output.ended.append(row.number)
            elif row.outcome == FAILED:
                output.failed[row.number] = row.failure
            if changes := row.objects.changes(again=True):
                output.states[row.number] = parcel(changes)
        return output
