"""Manages the calls that one group decodes together: the group's thread sends rounds and gives each call its tokens."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sized

import torch

from parallelformers_ng.batching.batch_proof import Trial
from parallelformers_ng.batching.round_messages import Round, RoundOutput
from parallelformers_ng.batching.scheduler import Scheduler
from parallelformers_ng.batching.ticket import Ticket
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.cuda_graphs.modes import StaticSteps
from parallelformers_ng.errors import BatchingError, GroupError, NotPortableError, WorkerError
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.request import Answers, Request, call_of, read
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.wire.frame import Flag, Frame

log = logging.getLogger("parallelformers_ng")


class Batch:
    """The calls that one group decodes together. Any thread may call `add` and `look`; other methods are for the
    group's thread.

    Args:
        has_answered: False for a group that was restarted and has answered no call: until the first call has ended, no
            step is recorded, because the callers have waited for the restart already.

    Attributes:
        steps: mode of the decode steps; None after the ranks have failed to record a step as a CUDA graph.
        scheduler: decides which calls join a round, and what the ranks run in it.
        is_due: lock that is held while a round is queued but has not begun.
    """

    def __init__(
        self,
        options: BatchingOptions,
        trial: Trial,
        group: WorkerGroup,
        steps: StaticSteps | None,
        has_answered: bool = True,
    ) -> None:
        self.group, self._has_answered = group, has_answered
        self.scheduler = Scheduler(options, group.device)
        self._options, self._trial, self.steps = options, trial, steps
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._batch = next(self._batches)
        self._adapters: ActiveAdapters | None = None  # adapters of all rows, and of the sequences in the prefix cache
        self._arrived: deque[Ticket] = deque()
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._max_rows, self._is_gathering = 0, False
        self.is_due = threading.Lock()

    @property
    def busy(self) -> bool:
        return bool(self._arrived or self._waiting or self._running)

    def add(self, ticket: Ticket, coming: Sized) -> None:
        """Queue a call. The call joins the batch as soon as a row and cache tokens are free.

        If nothing runs, the method waits for the calls `coming`, which other threads prepare, at most half of
        `prefill_patience`. Prompts that begin together run faster than prompts between the steps of other rows.
        """
        is_first = not self.busy
        self._arrived.append(ticket)
        if self._is_gathering:  # the first call waits in `_gather`, and then queues a round
            return
        if is_first:
            self._gather(coming)
        self.look()

    def _gather(self, coming: Sized) -> None:
        """Wait until no other thread prepares a call. If calls came together before, also wait until no call has come
        for a quarter of a decode step, at most 5 ms."""
        was_shared, self._max_rows = self._max_rows > 1, 0
        budget, arrived = self.scheduler.budget, 0
        end, pause = time.monotonic() + budget.gather_seconds, budget.pause
        try:
            self._is_gathering = True
            time.sleep(0)  # lets other threads run, which may be about to begin calls of `generate`
            while (len(coming) or (was_shared and arrived < len(self._arrived))) and time.monotonic() < end:
                arrived = len(self._arrived)
                time.sleep(pause)
        finally:
            self._is_gathering = False

    def look(self) -> None:
        """Queue a round if no round is queued. Any thread may call this method."""
        if self.is_due.acquire(blocking=False):
            self.group.submit(_RoundRequest(self))

    def next_round(self) -> Round | None:
        while self._arrived:
            self._waiting[next(self._numbers)] = self._arrived.popleft()
        leaves = [number for number, ticket in self._running.items() if ticket.given_up]
        for number in leaves:
            del self._running[number]
        self._waiting = {number: ticket for number, ticket in self._waiting.items() if not ticket.given_up}
        in_chunks = self._trial.in_chunks
        schedule = self.scheduler.next_round(self._waiting, self._running, in_chunks)
        joins = {number: self._waiting.pop(number) for number in schedule.admitted}
        for number, ticket in joins.items():
            self._running[number] = ticket
            ticket.runs = True
            if ticket.adapters != self._adapters:  # the earlier adapters have no row any more
                self._adapters, self._batch = ticket.adapters, next(self._batches)
        self._max_rows = max(self._max_rows, len(self._running))
        if not self._running and not leaves:
            return None
        prefixes = self._options.prefix_tokens if in_chunks else 0
        calls = {number: (*ticket.parcel, ticket.call.seed) for number, ticket in joins.items()}
        may_record = self.steps is not None and self._has_answered
        positions = min((ticket.positions for ticket in self._running.values()), default=0) if may_record else 0
        if positions and self.scheduler.room is not math.inf:
            positions = max(positions, int(self.scheduler.room))  # without a CUDA graph, a step copies the whole cache
        rows, updates, now = self._options.rows, dict[int, tuple[bytes, int]](), time.monotonic()
        for number, ticket in self._running.items():
            ticket.round_began, ticket.round_ends = now, now + self.group.timeout
            update, ticket.update = ticket.update, None
            if update is not None:
                updates[number] = update
        return Round(self._batch, calls, leaves, schedule, prefixes, self._adapters, positions, rows, updates)

    def take(self, outputs: list[RoundOutput], order: Round, seconds: float) -> None:
        """Give each call the result of a round, adjust the next rounds to the measured speed, and queue the next round.

        All ranks report the same tokens. Only the rank that chose a row's token reports a failure of the row and new
        states of the caller's objects (processors, criteria).
        """
        for number in order.joins:
            self._running[number].arrived()
        changed = [self._running[number] for number in (*outputs[0].tokens, *outputs[0].failed)]
        for number, tokens in outputs[0].tokens.items():
            self._running[number].take(tokens)
        for number in (*outputs[0].tokens, *outputs[0].late):
            self._running[number].decodes = True
        for number in order.updates.keys() & self._running.keys():
            self._running[number].states.append(None)
        for rank, report in enumerate(outputs):
            for number, changes in report.states.items():
                self._running[number].states.append(changes)
            for number, why in report.failed.items():
                if why is not None:
                    self._running[number].end((rank, why))
        for number in (*outputs[0].ended, *outputs[0].failed):
            self._running.pop(number).end()
            self._has_answered = True
        for ticket in self._running.values():
            ticket.given_up = ticket.given_up or ticket.ended
        self.scheduler.learn_room(outputs, available_memory)
        self.scheduler.budget.measure(order.schedule, outputs[0], seconds)
        if outputs[0].uncaptured and order.positions:
            self._without_graphs(outputs[0].uncaptured)
        self._go_on(changed)

    def _go_on(self, changed: list[Ticket]) -> None:
        """Queue the next round if calls are left, then wake the callers whose calls have output."""
        if self.busy:
            self.look()
        for ticket in changed:
            if ticket.has_output:
                # Wake callers after the next request is sent: a caller that wakes up would delay this thread.
                self.group.do_later(ticket.ring)

    def fail(self, error: BaseException, order: Round) -> None:
        """Restart or end all running calls after a round failed.

        A call that may have caused the error is a suspect; suspects run in separate rounds. If a device ran out of
        memory, no call is a suspect: later rounds run shorter chunks of prompts, and after another such error no CUDA
        graphs.
        """
        running, self._running = self._running, {}
        self._batch = next(self._batches)
        suspects = {number for number, ticket in running.items() if ticket.is_suspect} or order.joins or running
        needs_less = isinstance(error, torch.OutOfMemoryError) and self._use_less_memory(error, order)
        again = dict[int, Ticket]()
        for number, ticket in running.items():
            alone = len(running) == 1 and not needs_less
            if alone or not isinstance(error, (WorkerError, NotPortableError)):
                ticket.end(error)
            elif ticket.begin_again(error, suspected=number in suspects and not needs_less):
                again[number] = ticket
        self._waiting = dict(sorted({**again, **self._waiting}.items()))
        self._go_on([*running.values()])

    def _use_less_memory(self, error: torch.OutOfMemoryError, order: Round) -> bool:
        """Shorten the chunks of prompts, or, if they are short already, use no more CUDA graphs. Return whether a
        repeated round needs less memory than `order`."""
        if self.scheduler.budget.use_less_memory():
            return True
        if order.positions > 0:
            self._without_graphs(str(error).partition("\n")[0])
        return order.positions > 0

    def _without_graphs(self, why: str) -> None:
        """Log why the ranks could not record a CUDA graph; use no more graphs, and free the memory of earlier ones."""
        if self.steps is not None:
            level = logging.INFO if self.steps.by_default else logging.WARNING
            log.log(level, "calls that are decoded together run without CUDA graphs: %s", why)
        self.steps = None
        self.group.submit(Request("rank_state.forget_steps", [call_of("rank_state.forget_steps")]))

    def end(self, error: BaseException, others: BaseException | None) -> None:
        """End all calls of the batch and wake their callers, because the group has ended or a round failed.

        Calls with a row get `error`, and waiting calls get `others`; if that is None, another group may run the waiting
        calls.
        """
        running, waiting = [*self._running.values()], [*self._waiting.values()]
        self._running, self._waiting, self._batch = {}, {}, next(self._batches)
        with contextlib.suppress(IndexError):  # ends when the queue is empty, also if other threads change it
            while True:
                waiting.append(self._arrived.popleft())
        for ticket in running:
            ticket.end(error)
        for ticket in waiting:
            if others is None:
                ticket.lost = True
            else:
                ticket.end(others)
        for ticket in (*running, *waiting):
            ticket.ring()


class _RoundRequest(Request):
    """A request for one round. It chooses the round's calls just before it is sent, so that late calls can join."""

    def __init__(self, batch: Batch) -> None:
        super().__init__("decode_rows", (), Flag.EACH | Flag.TO_DEVICE)
        self._batch = batch
        self._round: Round | None = None
        self._begun = 0.0

    def prepare(self) -> bool:
        self._batch.is_due.release()  # a call that arrives from now on queues the next round
        try:
            self._round = self._batch.next_round()
        except Exception as error:
            self._break(error)
            return False
        if self._round is None:
            return False
        self._begun = time.monotonic()
        self.set_deadline(self._begun + self._batch.group.timeout)
        self.arguments = (self._round,), {}
        self.messages = [call_of(self.method, *self.arguments)]
        return True

    def put(self, item: Frame | Answers | GroupError | None) -> None:
        batch, order = self._batch, self._round
        if item is None:
            if not self.begun:
                batch.is_due.release()
            batch.end(batch.group.error(), None)
            return
        assert order is not None, "a round that was not sent has an answer"
        assert not isinstance(item, Frame), "rounds have no events"
        try:
            values, error = read(item) if isinstance(item, dict) else ([], item)
            if error is None:
                batch.take(values, order, time.monotonic() - self._begun)
            else:
                batch.fail(error, order)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        failure = BatchingError(f"the batch ended with an internal error: {type(error).__name__}: {error}")
        failure.__cause__ = error
        self._batch.end(failure, failure)
