"""Runs rounds of a batch on a rank. In a round, rows join and leave, and then all rows decode a few steps.

A round is one request to the ranks. Between rounds the ranks serve other requests, and the rows keep their caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prepared import prepare
from parallelformers_ng.batching.prompts import PrefillOutput, Prompts, is_causal, rows_of
from parallelformers_ng.batching.round_messages import Round, RoundOutput
from parallelformers_ng.batching.row import ENDED, FAILED, BatchRow
from parallelformers_ng.batching.rows import Rows
from parallelformers_ng.batching.slots import CapturedRows
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.generation.lockstep import OwnStream
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.runtime.failures import Description, describe
from parallelformers_ng.sharding import look_ups
from parallelformers_ng.wire.message import parcel, unpack


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

    def forget_rows(self) -> None:
        """Free the memory of the rows of a round that failed; the next round has a new batch."""
        self._batch, self._late = -1, []
        for name in ("_rows", "_prompts", "_prefixes"):
            vars(self).pop(name, None)

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

        schedule, ran_beside = order.schedule, False
        if len(self._prompts) and not late:
            began = time.monotonic()
            runs_beside = len(self._rows) and schedule.steps_between_prompts
            results = self._prompts.run(schedule.max_tokens, step if runs_beside else None)
            output.prompt_tokens, output.prompt_seconds = self._prompts.latest, time.monotonic() - began
            output.prompt_begin, ran_beside = self._prompts.latest_begin, self._prompts.ran_beside
            if 0 < schedule.late_tokens <= sum(prefill.mask.numel() for prefill in results):
                self._late, output.late = results, [row.number for row in rows_of(results)]
            elif results:
                changed_rows.update(self._rows.join(results))
        steps = (schedule.steps_between_prompts if len(self._prompts) else schedule.steps) - ran_beside
        output.steps = steps if len(self._rows) else 0
        changed_rows.update(self._rows.run(steps, order.positions, order.max_rows))
        output.uncaptured = self._captured.reason
        output.token_bytes, output.pads = self._rows.token_bytes, self._rows.pads
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
