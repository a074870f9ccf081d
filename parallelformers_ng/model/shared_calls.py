"""Decodes calls of `generate` on one model in a shared batch, and enforces the limits of the batch."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from parallelformers_ng.batching.batch import Batch
from parallelformers_ng.batching.batch_proof import Trial
from parallelformers_ng.batching.sharing import SharedCall, shared_call, tokens_of
from parallelformers_ng.batching.ticket import Ticket
from parallelformers_ng.cuda_graphs.modes import MAX_POSITIONS, static_generation
from parallelformers_ng.errors import BatchingError, DeadlineExpiredError
from parallelformers_ng.model.deployment import Replica
from parallelformers_ng.model.dispatcher import CallOptions, Dispatcher
from parallelformers_ng.options import BatchingOptions
from parallelformers_ng.wire.message import parcel
from parallelformers_ng.worker.call import Call


class SharedCalls:
    """Runs calls of one model on one replica as a shared batch (continuous batching).

    Attributes:
        batch: calls that the current group decodes together.
    """

    def __init__(
        self, options: BatchingOptions, trial: Trial, dispatcher: Dispatcher, replica: Replica, needs_graphs: bool
    ) -> None:
        self.trial = trial
        self._options, self._replica, self._needs_graphs = options, replica, needs_graphs
        self._edits, self._adapters, self._hooks = dispatcher.edits, dispatcher.adapters, dispatcher.hooks
        self._places = threading.Semaphore(options.rows + options.waiting)
        self._lock = threading.Lock()
        self._coming = set[int]()  # ids of threads that are about to add a call to the batch
        steps = replica.steps if replica.steps is not None and replica.steps.captured else None
        self.batch = Batch(options, trial, replica.group, steps)

    def generate(
        self, model: Any, arguments: dict[str, Any], options: CallOptions, draw_seed: Callable[[], int] | None
    ) -> torch.Tensor | str:
        """Decode a call in the shared batch.

        Return prompt and new tokens, int64 `[1, tokens]`; or the reason why the call has to run alone. `draw_seed`
        gives a seed to a sampling call without one; None if no other call runs.
        """
        if self._needs_graphs and not self._positions(model):
            return "its decode steps do not become CUDA graphs"
        self._check(*tokens_of(model, arguments))
        thread, end = threading.get_ident(), self._replica.group.deadline(options.timeout)
        try:
            self._coming.add(thread)
            call: Any = self.trial.why_alone(type(model), model.config, self._edits.code_count(), end)
            call = call or shared_call(model, arguments, options.seed, draw_seed)
        finally:
            self._coming.discard(thread)
        if isinstance(call, str):
            return call
        call.adapters = None if self._adapters is None else self._adapters.active()
        call.priority = options.priority or 0
        if time.monotonic() >= end:
            raise DeadlineExpiredError("'generate' was not sent: its deadline has passed")
        if not self._places.acquire(blocking=False):
            calls, rows = self._options.rows + self._options.waiting, self._options.rows
            raise _refused("waiting", f"{calls} calls run or wait for {rows} rows already; call later, or allow more")
        try:
            streamer = options.streamer
            if streamer is None:
                return self._wait(model, call, end, None)

            # The prompt comes with the first tokens: if the ranks refuse the call, another loop streams the prompt.
            unstreamed = [call.prompt]

            def put(tokens: list[int]) -> None:
                while unstreamed:
                    streamer.put(unstreamed.pop())
                for token in tokens:
                    streamer.put(torch.tensor([token]))

            sequence = self._wait(model, call, end, put)
            put([])
            streamer.end()
            return sequence
        finally:
            self._places.release()

    def _positions(self, model: Any) -> int:
        """Return the largest cache, in rows × tokens, whose decode steps become CUDA graphs; 0 for none. The result is
        `sys.maxsize` if the caller asked for CUDA graphs."""
        steps = self.batch.steps
        if steps is None or self._hooks.present() or static_generation(model, {"max_new_tokens": 1}, steps)[1]:
            return 0
        return MAX_POSITIONS if steps.by_default else sys.maxsize

    def _wait(
        self, model: Any, call: SharedCall, end: float, on_tokens: Callable[[list[int]], object] | None
    ) -> torch.Tensor:
        """Add a call to the batch and return its sequence; if the workers are restarted meanwhile, try again."""
        while True:
            group, incarnation, _ = self._replica.ready(end)
            if not group.alive:  # the group has ended for good, because `ready` has started no new group
                raise group.error()
            followed = call.objects.followed(call.objects.has_own_code) if call.objects.parts else None
            message = Call("", "generate", (), call.kwargs, adapters=call.adapters, followed=followed)
            arrived = self._edits.put_into(message, group)
            ticket = Ticket(call, parcel(message), self._positions(model), arrived, on_tokens)
            with self._lock:
                if self.batch.group is not group:
                    has_answered = incarnation == self._replica.answered
                    self.batch = Batch(self._options, self.trial, group, self.batch.steps, has_answered)
                batch = self.batch
            try:
                batch.add(ticket, self._coming)
                sequence = ticket.wait(end)
            finally:
                ticket.given_up = True
                if not ticket.ended:  # wake the batch, which removes the row of this call
                    batch.look()
            if sequence is not None:
                self._replica.answered = max(self._replica.answered, incarnation)
                return sequence

    def _check(self, prompt: int, tokens: int) -> None:
        """Raise BatchingError if a call may need more tokens than the limits allow; `tokens` includes the prompt."""
        limits = {
            "prompt_tokens": ("has a prompt of", prompt, self._options.prompt_tokens),
            "new_tokens": ("asks for", tokens - prompt, self._options.new_tokens),
            "cache_tokens": ("may need", tokens, self.batch.scheduler.room),
        }
        for name, (what, count, most) in limits.items():
            if most is not None and count > most:
                raise _refused(
                    name, f"the call {what} {count:,} tokens, and {most:,} are allowed; ask for fewer, or allow more"
                )


def _refused(option: str, message: str) -> BatchingError:
    """Return the error for a call that exceeds a limit; `option` is the limit's name in `batching=`."""
    error = BatchingError(f"{message} with batching={{{option!r}: …}}")
    error.option = option
    return error
