"""The caller's end of a batch: calls wait here, a thread sends rounds while there are any, and each gets its tokens."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from parallelformers_ng.batching.rounds import News, Round
from parallelformers_ng.errors import BatchingError, RequestTimeoutError
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.runtime.failures import rebuild

Send = Callable[[Round], News]
"""Has the ranks of a model run a round."""


class Ticket:
    """A call that waits for its tokens. The fields belong to the lock of its queue."""

    def __init__(self, send: Send, kwargs: dict[str, Any], seed: int | None) -> None:
        self.send = send
        self.kwargs = kwargs
        self.seed = seed
        self.tokens: list[int] = []
        self.error: BaseException | None = None
        self.ended = False
        self.given_up = False


class Queue:
    """Calls of one model that are decoded together.

    Args:
        options: how many may run, and wait.
    """

    def __init__(self, options: BatchingOptions) -> None:
        self._options = options
        self._changed = threading.Condition()
        self._numbers, self._batches = itertools.count(), itertools.count()
        self._batch = next(self._batches)
        self._waiting: dict[int, Ticket] = {}
        self._running: dict[int, Ticket] = {}
        self._has_thread = False

    def generate(
        self,
        send: Send,
        kwargs: dict[str, Any],
        seed: int | None,
        end: float,
        on_tokens: Callable[[list[int]], object] | None = None,
    ) -> torch.Tensor:
        """Wait for a call's tokens.

        Args:
            send: for all that run meanwhile. It may hold the model, for the queue holds it no longer than the call.
            kwargs: of `generate`.
            seed: of its random stream, None where it draws nothing.
            end: until when, on the clock of `time.monotonic`, in seconds.
            on_tokens: called in this thread with new tokens as they come.

        Returns:
            Prompt and tokens, int64 `[1, tokens]`.

        Raises:
            BatchingError: too many wait already.
            RequestTimeoutError: the time passed; its row ends with the round that runs.
            GroupError: what ended its row, or the whole batch.
        """
        ticket, told = Ticket(send, kwargs, seed), 0
        with self._changed:
            if len(self._waiting) >= self._options.waiting:
                raise BatchingError(
                    f"{len(self._waiting)} calls wait for {self._options.rows} rows already; call later, or allow more"
                    " with batching={'waiting': …}"
                )
            self._waiting[next(self._numbers)] = ticket
            self._start_thread()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: ticket.ended or len(ticket.tokens) > told,  # noqa: B023  called at once
                        min(end - time.monotonic(), threading.TIMEOUT_MAX),
                    )
                    new, told = ticket.tokens[told:], len(ticket.tokens)
                    error, ended = ticket.error, ticket.ended
                if new and on_tokens is not None:
                    on_tokens(new)
                if error is not None:
                    raise error
                if ended:
                    prompt: torch.Tensor = kwargs["input_ids"]
                    return torch.cat((prompt, torch.tensor([ticket.tokens], dtype=prompt.dtype)), -1)
                if time.monotonic() >= end:
                    raise RequestTimeoutError(f"'generate' ran past its deadline with {told} tokens")
        finally:
            with self._changed:
                ticket.given_up = True  # where it has not ended: its row leaves

    def _start_thread(self) -> None:
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=self._decode, name="batch", daemon=True).start()

    def _decode(self) -> None:
        """Send rounds until nobody waits."""
        while True:
            with self._changed:
                asked = self._next_round()
                if asked is None:
                    self._has_thread = False
                    return
                send = next(iter(self._running.values())).send
            try:
                news: News | BaseException = send(asked)
            except BaseException as error:  # whoever waits is told
                news = error
            with self._changed:
                self._take(news)
                self._changed.notify_all()

    def _next_round(self) -> Round | None:
        leaves = [number for number, ticket in self._running.items() if ticket.given_up]
        for number in leaves:
            del self._running[number]
        self._waiting = {number: ticket for number, ticket in self._waiting.items() if not ticket.given_up}
        free = self._options.rows - len(self._running)
        joins = dict(itertools.islice(self._waiting.items(), free))
        for number in joins:
            self._running[number] = self._waiting.pop(number)
        if not self._running:
            self._batch = next(self._batches)  # what has left need not be told to leave
            return None
        calls = {number: (ticket.kwargs, ticket.seed) for number, ticket in joins.items()}
        return Round(self._batch, calls, leaves)

    def _take(self, news: News | BaseException) -> None:
        if isinstance(news, BaseException):
            for ticket in self._running.values():
                ticket.error, ticket.ended = news, True
            self._running.clear()
            self._batch = next(self._batches)
            return
        for number, tokens in news.tokens.items():
            self._running[number].tokens += tokens
        for number, why in news.failed.items():
            self._running[number].error = rebuild(0, why)
        for number in (*news.ended, *news.failed):
            self._running.pop(number).ended = True
