"""Waits in the caller's thread for the tokens of a call of `generate` in a batch."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from parallelformers_ng.batching.sharing import SharedCall
from parallelformers_ng.errors import DeadlineExpiredError, DivergedError, GroupError, RequestTimeoutError
from parallelformers_ng.runtime.failures import Description, rebuild
from parallelformers_ng.runtime.group import LOOK_SECONDS
from parallelformers_ng.runtime.inspection import reports_of
from parallelformers_ng.runtime.limits import cancellation_of_thread
from parallelformers_ng.sharding.active_adapters import ActiveAdapters
from parallelformers_ng.wire.message import parcel as packed
from parallelformers_ng.wire.message import unpack

_MAX_FAILURES = 3
_SLOW_SECONDS = 1.0  # a round that runs longer may hang
_REPORT_SECONDS = 10.0  # time in which a group that ends for a late round says where its ranks stood


class Ticket:
    """One call in a batch. The group's thread adds tokens; the caller's thread waits for a signal and reads the tokens.

    Args:
        call: the call.
        parcel: arguments of the call for the ranks: `message.parcel` of a `Call`.
        positions: size of the largest cache whose steps may become CUDA graphs for this call, in rows × tokens.
        arrived: function without arguments, called when the ranks have received the parcel.
        on_tokens: function that receives new tokens as soon as they arrive; None for no streaming.

    Attributes:
        tokens: new tokens so far.
        states: pickled changes of the call's processors and criteria; None says that the ranks have applied `update`.
        update: pickled changes of these objects by other threads, to be sent with the next round; or None.
        runs: whether the call has a row of the batch.
        decodes: whether the ranks have run the prompt, so that the row waits for its next token.
        ended: whether no further token will come.
        error: error that ended the call: an exception, or the number of a rank and its description of an exception.
        lost: whether the group ended before the ranks received the call, so that another group may run the call.
        round_began: time at which the latest round of the call began, as of `time.monotonic`.
        round_ends: deadline of that round, at which the group ends.
        given_up: whether the caller has stopped waiting.
        failures: number of failed rounds in which the call was a suspect.
        suspect: number of tokens until which the call is suspected of causing a failure. Two suspects never share a
            round. After a second failure, it shares rounds with no other call, so that only the faulty call fails.
    """

    def __init__(
        self,
        call: SharedCall,
        parcel: tuple[bytes, int],
        positions: int,
        arrived: Callable[[], None],
        on_tokens: Callable[[list[int]], object] | None = None,
    ) -> None:
        self.call, self.parcel, self.positions, self.arrived = call, parcel, positions, arrived
        self._on_tokens = on_tokens
        self.tokens: list[int] = []
        self.states: deque[tuple[bytes, int] | None] = deque()
        self.update: tuple[bytes, int] | None = None
        self.runs = self.decodes = self.ended = self.lost = self.given_up = False
        self.error: BaseException | tuple[int, Description] | None = None
        self.round_began = self.round_ends = 0.0
        self.failures = self.suspect = 0
        self._again = 0  # number of tokens since the last start; a restarted call repeats its first tokens
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    # -- in the thread of the group ------------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        return self.call.tokens[0]

    @property
    def tokens_needed(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.call.tokens[1]

    @property
    def adapters(self) -> ActiveAdapters | None:
        return self.call.adapters

    @property
    def priority(self) -> int:
        return self.call.priority

    @property
    def is_suspect(self) -> bool:
        """Whether the call may fail its next round, and so must not share the round with another suspect."""
        return self._again < self.suspect

    @property
    def needs_solitude(self) -> bool:
        """Whether the call must not share its next round with any other call."""
        return self.failures > 1 and self.is_suspect

    @property
    def streams(self) -> bool:
        """Whether the caller's thread reads each token when it comes: for a streamer, or to find the end."""
        return self._on_tokens is not None or bool(self.call.endings)

    @property
    def has_output(self) -> bool:
        """Whether the caller's thread must wake up now. Its wake-ups slow the ranks, which run on the same cores."""
        return self.ended or bool(self.states) or self.streams

    def take(self, tokens: list[int]) -> None:
        """Add tokens from the ranks. After a failed round, check that the repeated tokens are the same."""
        for token in tokens:
            if self._again < len(self.tokens) and self.tokens[self._again] != token:
                self.end(DivergedError("this call was restarted after another call failed, and its tokens changed"))
                return
            if self._again == len(self.tokens):
                self.tokens.append(token)
            self._again += 1

    def end(self, error: BaseException | tuple[int, Description] | None = None) -> None:
        """Mark the call as ended, without waking the caller. The first of several errors is kept."""
        self.error = self.error or error
        self.ended = True

    def begin_again(self, error: BaseException, suspected: bool) -> bool:
        """Restart the call at its prompt after a failed round, or end it with the error. Return whether it restarts.

        The call ends at its third failure as a suspect, or if its processors or criteria have state, which cannot
        restart.
        """
        self.failures += suspected
        if self.failures >= _MAX_FAILURES or self.call.objects.parts:  # objects with changed state cannot start again
            self.end(error)
            return False
        self.suspect = len(self.tokens) + 1 if suspected else 0
        self._again = 0
        self.runs = self.decodes = False
        return True

    def ring(self) -> None:
        """Wake the caller's thread. Any thread may call this method."""
        self._bell.put(None)

    # -- in the thread of the caller -----------------------------------------------------------------------------

    def wait(self, end: float) -> torch.Tensor | None:
        """Wait until the call ends; return prompt and new tokens, int64 `[1, tokens]`, or None if it is `lost`."""
        cancellation = cancellation_of_thread()
        cancellation.wake = self.ring
        next_look = time.monotonic() + LOOK_SECONDS
        new_count, ids = 0, self.call.prompt
        pause = LOOK_SECONDS if self.call.objects.has_own_code else threading.TIMEOUT_MAX
        while True:
            cancellation.check()
            ended = self.ended  # read before the tokens, because no token comes after the end
            while self.states:
                changes = self.states.popleft()
                if changes is None:
                    self.call.objects.confirm()
                else:
                    self.call.objects.restore(unpack(*changes))
            before, ids, is_last = ids, *self.call.follow(ids, self.tokens[new_count:])
            new_count = ids.shape[1] - self.call.prompt.shape[1]
            if self._on_tokens is not None and ids is not before:
                self._on_tokens(ids[0, before.shape[1] :].tolist())
            if is_last:
                return ids
            if ended:
                if self.error is None:
                    return ids
                # Several callers may raise the same error object, so drop the traceback of an earlier raise.
                raise rebuild(*self.error) if isinstance(self.error, tuple) else self.error.with_traceback(None)
            if self.lost:
                return None
            try:
                if pause == LOOK_SECONDS and time.monotonic() >= next_look:
                    next_look = time.monotonic() + LOOK_SECONDS
                    if (update := self.call.objects.update()) is not None:
                        self.update = packed(update)
                until = end if time.monotonic() < end else self._last_moment(end)
                self._bell.get(timeout=min(max(until - time.monotonic(), 0.0), pause))
            except queue.Empty:
                if time.monotonic() >= self._last_moment(end):
                    raise self._late() from None

    def _last_moment(self, end: float) -> float:
        """Return when to stop waiting: a little later than `end` if a round that may hang has its deadline then, too,
        because the group's error says where the ranks stood."""
        if self.round_began + _SLOW_SECONDS < end < self.round_ends < end + 2 * _SLOW_SECONDS:
            return self.round_ends + _REPORT_SECONDS
        return end

    def _late(self) -> RequestTimeoutError:
        """Return the error of a call that ends alone, while the ranks go on with its batch."""
        if not self.runs and not self.tokens:
            return DeadlineExpiredError("'generate' did not get its turn in the batch before its deadline")
        phase = f"with {len(self.tokens)} new tokens{'' if self.runs else ', waiting to begin again'}"
        if not self.tokens:
            phase = f"in its prompt of {self.call.prompt.shape[1]} tokens"
        text, seconds = f"'generate' ran past its deadline {phase}", time.monotonic() - self.round_began
        with contextlib.suppress(GroupError, OSError):  # the ranks have just ended, or are on other hosts
            if self.runs and seconds > _SLOW_SECONDS:
                text += f"; its round began {seconds:.3g} s ago, and the ranks stand here:\n"
                text += "\n".join(reports_of(os.getpid()))
        return RequestTimeoutError(text)
