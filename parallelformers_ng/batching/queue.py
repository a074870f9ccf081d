"""The caller's end of a batch: calls wait here, a thread sends rounds while there are any, and each gets its tokens."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable

import torch

from parallelformers_ng.batching.proof import Trial
from parallelformers_ng.batching.rounds import News, Round
from parallelformers_ng.batching.sharing import SharedCall
from parallelformers_ng.batching.ticket import Send, Ticket
from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.errors import (
    BatchingError,
    DeadlineExpiredError,
    NotPortableError,
    RequestTimeoutError,
    WorkerError,
)
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.runtime.cancellation import cancellation_of_thread
from parallelformers_ng.runtime.failures import rebuild
from parallelformers_ng.sharding.active_adapters import ActiveAdapters

_ROUND_SECONDS = 0.02
"""How long a round takes at least, where a step takes less: so long waits who comes next. To ask the ranks takes a
fifth of a millisecond."""
_MOST_STEPS = 8


class Queue:
    """Calls of one model that are decoded together.

    Args:
        options: how many may run, and wait.
        trial: says how their prompts run.
    """

    def __init__(self, options: BatchingOptions, trial: Trial) -> None:
        self._options = options
        self._trial = trial
        self._changed = threading.Condition()
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._batch = next(self._batches)
        self._adapters: ActiveAdapters | None = None  # of the batch: what is kept of its sequences is theirs
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._steps = 1
        self._room = options.cache_tokens or math.inf  # tokens that the caches of all rows may have, padding counted
        self._has_thread = False

    @property
    def busy(self) -> bool:
        """True while calls wait or run."""
        return self._has_thread

    def check(self, prompt: int, tokens: int) -> None:
        """Refuse a call that may come to more tokens than are allowed.

        Args:
            prompt: its tokens.
            tokens: of the prompt and all that may follow.

        Raises:
            BatchingError: it may.
        """
        limits = {
            "prompt_tokens": ("has a prompt of", prompt, self._options.prompt_tokens),
            "new_tokens": ("asks for", tokens - prompt, self._options.new_tokens),
            "cache_tokens": ("may come to", tokens, self._room),
        }
        for name, (what, count, most) in limits.items():
            if most is not None and count > most:
                raise _refused(
                    name, f"the call {what} {count:,} tokens, and {most:,} are allowed; ask for fewer, or allow more"
                )

    def generate(
        self, call: SharedCall, send: Send, end: float, on_tokens: Callable[[list[int]], object] | None = None
    ) -> torch.Tensor:
        """Wait for a call's tokens.

        Args:
            send: for all that run meanwhile, see `Ticket`.
            end: until when, on the clock of `time.monotonic`, in seconds.
            on_tokens: called in this thread with new tokens as they come.

        Returns:
            Prompt and tokens, int64 `[1, tokens]`.

        Raises:
            BatchingError: too many wait already.
            DeadlineExpiredError: the time passed before the ranks were asked.
            RequestTimeoutError: the time passed; its row ends with the round that runs.
            RequestCancelledError: another thread has cancelled it; likewise.
            GroupError: what ended its row, or the whole batch.
        """
        if time.monotonic() >= end:
            raise DeadlineExpiredError("'generate' was not sent: its deadline has passed")
        ticket, told, ids = Ticket(call, send), 0, call.prompt
        cancellation = cancellation_of_thread()
        cancellation.wake = self._wake
        with self._changed:
            calls = sum(not each.given_up for each in (*self._running.values(), *self._waiting.values()))
            if calls >= self._options.rows + self._options.waiting:
                raise _refused(
                    "waiting",
                    f"{calls} calls have or wait for {self._options.rows} rows already; call later, or allow more",
                )
            self._start_thread()
            self._waiting[next(self._numbers)] = ticket
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: ticket.ended or len(ticket.tokens) > told or cancellation.asked,  # noqa: B023  at once
                        min(end - time.monotonic(), threading.TIMEOUT_MAX),
                    )
                    new, states, ended, error = ticket.tokens[told:], ticket.states, ticket.ended, ticket.error
                    ticket.states = []
                cancellation.check()
                for state in states:
                    call.restore(state)
                before, ids, is_last = ids, *call.follow(ids, new)
                told = ids.shape[1] - call.prompt.shape[1]
                if on_tokens is not None and ids is not before:
                    on_tokens(ids[0, before.shape[1] :].tolist())
                if is_last:
                    return ids
                if error is not None:
                    raise error
                if ended:
                    return ids
                if time.monotonic() >= end:
                    with self._changed:
                        waits = ticket in self._waiting.values()
                    if waits and not told:
                        raise DeadlineExpiredError("'generate' did not get its turn in the batch before its deadline")
                    raise RequestTimeoutError(f"'generate' ran past its deadline with {told} tokens")
        finally:
            with self._changed:
                ticket.given_up = True  # where it has not ended: its row leaves

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _start_thread(self) -> None:
        if not self._has_thread:
            threading.Thread(target=self._decode, name="batch", daemon=True).start()  # it waits for the queue's lock
            self._has_thread = True

    def _decode(self) -> None:
        """Send rounds until nobody waits. An error of this thread's own ends all calls."""
        try:
            while self._run_round():
                pass
        except BaseException as error:
            with self._changed:
                failure = BatchingError(f"the batch ended with an error of its own: {type(error).__name__}: {error}")
                failure.__cause__ = error
                for ticket in (*self._running.values(), *self._waiting.values()):
                    ticket.end(failure)
                self._running, self._waiting, self._batch = {}, {}, next(self._batches)
                self._has_thread = False
                self._changed.notify_all()

    def _run_round(self) -> bool:
        """Send a round. Returns whether there was one to send."""
        with self._changed:
            asked, send = self._next_round()
            if send is None:
                self._has_thread = False
                return False
        begun = time.monotonic()
        try:
            news: list[News] | BaseException = send(asked)
        except BaseException as error:  # whoever waits is told
            news = error
        with self._changed:
            if isinstance(news, BaseException):
                self._fail(news, asked)
            else:
                self._take(news)
                self._measure(news)
                if not asked.joins:
                    step = (time.monotonic() - begun) / asked.steps
                    self._steps = max(1, min(_MOST_STEPS, int(_ROUND_SECONDS / step)))
            self._changed.notify_all()
        return True

    def _next_round(self) -> tuple[Round, Send | None]:
        """The next round, and what sends it: None where there is nothing to do."""
        left = {number: ticket for number, ticket in self._running.items() if ticket.given_up}
        self._running = {number: ticket for number, ticket in self._running.items() if number not in left}
        self._waiting = {number: ticket for number, ticket in self._waiting.items() if not ticket.given_up}
        joins = self._admitted()
        for number, ticket in joins.items():
            self._running[number] = self._waiting.pop(number)
            if ticket.call.adapters != self._adapters:  # no row runs with the others any more
                self._adapters, self._batch = ticket.call.adapters, next(self._batches)
        calls = {number: (ticket.call.kwargs, ticket.call.seed) for number, ticket in joins.items()}
        limits = self._options.prefill_chunk, self._options.prefix_tokens
        limits = limits if self._trial.in_pieces else (0, 0)
        asked = Round(self._batch, calls, [*left], *limits, self._steps, self._adapters)
        return asked, next((ticket.send for ticket in (*self._running.values(), *left.values())), None)

    def _admitted(self) -> dict[int, Ticket]:
        """Who comes next, in the order in which they came."""
        rows, joins = [*self._running.values()], dict[int, Ticket]()
        for number, ticket in self._waiting.items():
            longest = max(row.call.tokens[1] for row in (*rows, ticket))
            full = len(rows) >= self._options.rows or (rows and longest * (len(rows) + 1) > self._room)
            full = full or any(row.needs_solitude or row.call.adapters != ticket.call.adapters for row in rows)
            suspected = ticket.is_suspect and any(row.is_suspect for row in rows)
            if full or suspected or (rows and ticket.needs_solitude):
                break
            joins[number] = ticket
            rows.append(ticket)
        return joins

    def _take(self, news: list[News]) -> None:
        """What the ranks say. Tokens are the same on all; what failed, and states, one knows."""
        for number, tokens in news[0].tokens.items():
            self._running[number].take(tokens)
        for rank, said in enumerate(news):
            for number, changes in said.states.items():
                self._running[number].states.append(changes)
            for number, why in said.failed.items():
                if why is not None:
                    self._running[number].end(rebuild(rank, why))
        for number in (*news[0].ended, *news[0].failed):
            self._running.pop(number).end()
        for number in [number for number, ticket in self._running.items() if ticket.ended]:
            self._running[number].given_up = True

    def _measure(self, news: list[News]) -> None:
        """Half of the memory that is free when the first row runs is for caches, unless the caller has said."""
        if self._room is not math.inf or not all(said.token_bytes for said in news):
            return
        of_devices = [said.free_bytes // 2 // said.token_bytes for said in news if said.free_bytes]
        of_host = available_memory() // 2 // sum(said.token_bytes for said in news)
        self._room = min(of_devices, default=of_host)

    def _fail(self, error: BaseException, asked: Round) -> None:
        """No row of the batch can go on. Where only the round failed, they begin again, suspects one at a time.

        Where recorded steps were what had no room, nobody is suspected: there are none from now on."""
        running, self._running = self._running, {}
        self._batch = next(self._batches)
        suspects = {number for number, ticket in running.items() if ticket.is_suspect} or asked.joins or running
        recorded = asked.positions > 0 and isinstance(error, torch.OutOfMemoryError)
        again = dict[int, Ticket]()
        for number, ticket in running.items():
            alone = len(running) == 1 and not recorded
            if alone or not isinstance(error, (WorkerError, NotPortableError)):
                ticket.end(error)
            elif ticket.begin_again(error, suspected=number in suspects and not recorded):
                again[number] = ticket
        self._waiting = dict(sorted({**again, **self._waiting}.items()))


def _refused(option: str, message: str) -> BatchingError:
    """Return the error of a call that a limit refuses.

    Args:
        option: option of `batching=` that sets the limit.
        message: what is wrong.
    """
    error = BatchingError(f"{message} with batching={{{option!r}: …}}")
    error.option = option
    return error
