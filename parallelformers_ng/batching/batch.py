"""Calls of one model that one group decodes together: its thread sends rounds while there are any, and each gets its
tokens."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from parallelformers_ng.batching.batch_proof import Trial
from parallelformers_ng.batching.rounds import News, Round
from parallelformers_ng.batching.ticket import Ticket
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.errors import BatchingError, GroupError, NotPortableError, WorkerError
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.runtime.exchange import Answers, Request, call_of, read
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.wire.frame import Flag, Frame

_ROUND_SECONDS = 0.02
"""How long a round takes at least, if a step takes less: so long waits who comes next. To ask the ranks takes a fifth
of a millisecond."""
_MOST_STEPS = 8


class Batch:
    """The rows of one group. Any thread may add one; all else is for the thread of the group.

    Args:
        options: how many rows may run.
        trial: says how prompts run.
        group: the workers.
        no_graphs: told why steps became no CUDA graphs that should.

    Attributes:
        room: tokens that the caches of all rows may have, padding counted.
        is_due: locked while a round is queued that has not begun.
    """

    def __init__(
        self,
        options: BatchingOptions,
        trial: Trial,
        group: WorkerGroup,
        no_graphs: Callable[[str], object],
    ) -> None:
        self.group = group
        self.room = options.cache_tokens or math.inf
        self._options, self._trial, self._no_graphs = options, trial, no_graphs
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._batch = next(self._batches)
        self._adapters: ActiveAdapters | None = None  # of the batch: what is kept of its sequences is theirs
        self._arrived: deque[Ticket] = deque()
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._steps, self._has_graphs = 1, True
        self.is_due = threading.Lock()

    @property
    def busy(self) -> bool:
        """True while calls wait or run."""
        return bool(self._arrived or self._waiting or self._running)

    def add(self, ticket: Ticket) -> None:
        """Have a call join as soon as there is room."""
        self._arrived.append(ticket)
        self.look()

    def look(self) -> None:
        """Have a round run, if none is queued. Any thread may."""
        if self.is_due.acquire(blocking=False):
            self.group.submit(_RoundRequest(self))

    def next_round(self) -> Round | None:
        """Return the next round; None if there is nothing to do."""
        while self._arrived:
            self._waiting[next(self._numbers)] = self._arrived.popleft()
        left = [number for number, ticket in self._running.items() if ticket.given_up]
        for number in left:
            del self._running[number]
        self._waiting = {number: ticket for number, ticket in self._waiting.items() if not ticket.given_up}
        joins = self._admitted()
        for number, ticket in joins.items():
            self._running[number] = self._waiting.pop(number)
            ticket.runs = True
            if ticket.call.adapters != self._adapters:  # no row runs with the others any more
                self._adapters, self._batch = ticket.call.adapters, next(self._batches)
        if not self._running and not left:
            return None
        limits = self._options.prefill_chunk, self._options.prefix_tokens
        limits = limits if self._trial.in_pieces else (0, 0)
        calls = {number: (*ticket.parcel, ticket.call.seed) for number, ticket in joins.items()}
        positions = min((ticket.positions for ticket in self._running.values()), default=0) if self._has_graphs else 0
        return Round(self._batch, calls, left, *limits, self._steps, self._adapters, positions)

    def _admitted(self) -> dict[int, Ticket]:
        """Yield the next calls, in the order of their arrival."""
        rows, joins = [*self._running.values()], dict[int, Ticket]()
        for number, ticket in self._waiting.items():
            longest = max(row.call.tokens[1] for row in (*rows, ticket))
            full = len(rows) >= self._options.rows or (rows and longest * (len(rows) + 1) > self.room)
            full = full or any(row.needs_solitude or row.call.adapters != ticket.call.adapters for row in rows)
            suspected = ticket.is_suspect and any(row.is_suspect for row in rows)
            if full or suspected or (rows and ticket.needs_solitude):
                break
            joins[number] = ticket
            rows.append(ticket)
        return joins

    def take(self, news: list[News], order: Round, seconds: float) -> None:
        """Merge the ranks' reports of a round. Tokens are the same on all; failures and states are known to one."""
        for number in order.joins:
            self._running[number].arrived()
        met = [self._running[number] for number in (*news[0].tokens, *news[0].failed)]
        for number, tokens in news[0].tokens.items():
            self._running[number].take(tokens)
        for rank, said in enumerate(news):
            for number, changes in said.states.items():
                self._running[number].states.append(changes)
            for number, why in said.failed.items():
                if why is not None:
                    self._running[number].end((rank, why))
        for number in (*news[0].ended, *news[0].failed):
            self._running.pop(number).end()
        for ticket in self._running.values():
            ticket.given_up = ticket.given_up or ticket.ended
        self._measure(news)
        if not order.joins:
            self._steps = max(1, min(_MOST_STEPS, int(_ROUND_SECONDS * order.steps / seconds)))
        if news[0].uncaptured and order.positions:
            self._without_graphs(news[0].uncaptured)
        self._go_on(met)

    def _go_on(self, met: list[Ticket]) -> None:
        if self.busy:
            self.look()
        # The next request is sent first: who wakes up now would keep this thread from it.
        self.group.do_later(functools.partial(_ring, met))

    def _measure(self, news: list[News]) -> None:
        """Half of the memory that is free when the first row runs is for caches, unless the caller has said."""
        if self.room is not math.inf or not all(said.token_bytes for said in news):
            return
        of_devices = [said.free_bytes // 2 // said.token_bytes for said in news if said.free_bytes]
        of_host = available_memory() // 2 // sum(said.token_bytes for said in news)
        self.room = min(of_devices, default=of_host)

    def fail(self, error: BaseException, order: Round) -> None:
        """No row of the batch can go on. If only the round failed, they begin again, suspects one at a time.

        If recorded steps were what had no room, nobody is suspected: there are none from now on."""
        running, self._running = self._running, {}
        self._batch = next(self._batches)
        suspects = {number for number, ticket in running.items() if ticket.is_suspect} or order.joins or running
        recorded = order.positions > 0 and isinstance(error, torch.OutOfMemoryError)
        if recorded:
            self._without_graphs(str(error).partition("\n")[0])
        again = dict[int, Ticket]()
        for number, ticket in running.items():
            alone = len(running) == 1 and not recorded
            if alone or not isinstance(error, (WorkerError, NotPortableError)):
                ticket.end(error)
            elif ticket.begin_again(error, suspected=number in suspects and not recorded):
                again[number] = ticket
        self._waiting = dict(sorted({**again, **self._waiting}.items()))
        self._go_on([*running.values()])

    def _without_graphs(self, why: str) -> None:
        self._no_graphs(why)
        self._has_graphs = False
        self.group.submit(Request("forget_steps", [call_of("forget_steps")]))

    def end(self, error: BaseException, others: BaseException | None) -> None:
        """End the batch: the group has ended, or a round failed.

        Args:
            error: error for the calls with running rows.
            others: error for the waiting calls; None: another group can have them.
        """
        running, waiting = [*self._running.values()], [*self._waiting.values(), *self._arrived]
        self._running, self._waiting, self._batch = {}, {}, next(self._batches)
        self._arrived.clear()
        for ticket in running:
            ticket.end(error)
        for ticket in waiting:
            if others is None:
                ticket.lost = True
            else:
                ticket.end(others)
        for ticket in (*running, *waiting):
            ticket.ring()


def _ring(tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.ring()


class _RoundRequest(Request):
    """A round, which is made when its turn comes."""

    def __init__(self, batch: Batch) -> None:
        super().__init__("decode_rows", (), Flag.EACH | Flag.TO_DEVICE)
        self._batch = batch
        self._asked: Round | None = None
        self._begun = 0.0

    def prepare(self) -> bool:
        self._batch.is_due.release()  # whoever comes from now on asks for the next one
        try:
            self._asked = self._batch.next_round()
        except Exception as error:
            self._break(error)
            return False
        if self._asked is None:
            return False
        self._begun = time.monotonic()
        self.set_deadline(self._begun + self._batch.group.timeout)
        self.messages = [call_of(self.method, (self._asked,))]
        return True

    def put(self, news: Frame | Answers | GroupError | None) -> None:
        batch, order = self._batch, self._asked
        if news is None:
            if not self.begun:
                batch.is_due.release()
            batch.end(batch.group.error(), None)
            return
        assert order is not None, "what was never sent has no answer"
        assert not isinstance(news, Frame), "rounds have no events"
        try:
            values, error = read(news) if isinstance(news, dict) else ([], news)
            if error is None:
                batch.take(values, order, time.monotonic() - self._begun)
            else:
                batch.fail(error, order)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        failure = BatchingError(f"the batch ended with an error of its own: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._batch.end(failure, failure)
