"""A call of `generate` that waits in the caller for its tokens."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from parallelformers_ng.batching.sharing import SharedCall
from parallelformers_ng.errors import DeadlineExpiredError, DivergedError, RequestTimeoutError
from parallelformers_ng.runtime.cancellation import cancellation_of_thread
from parallelformers_ng.runtime.failures import Description, rebuild
from parallelformers_ng.wire.message import unpack

_MOST_FAILURES = 3


class Ticket:
    """One call in a batch. The thread of the group changes it, the caller's waits for the bell and reads.

    Args:
        call: the call.
        parcel: the same for the ranks, `message.parcel` of a `Call`.
        positions: the call's contribution to `Round.positions`.
        arrived: called once the ranks have the parcel.

    Attributes:
        tokens: chosen so far.
        states: parcels of what has become of the call's processors and criteria.
        runs: it has a row.
        ended: no more will come.
        error: why, if it did not end well: an exception, or a rank and its description of one.
        lost: the group has ended, and the ranks were never asked: another group can be.
        given_up: nobody waits for it any more.
        failures: rounds that failed while it was suspected.
        suspect: until this many tokens have come. A suspect shares rounds with no other, and the second time with no
            other row at all, so that it fails alone if it does.
    """

    def __init__(
        self, call: SharedCall, parcel: tuple[bytes, int], positions: int, arrived: Callable[[], None]
    ) -> None:
        self.call, self.parcel, self.positions, self.arrived = call, parcel, positions, arrived
        self.tokens: list[int] = []
        self.states: deque[tuple[bytes, int]] = deque()
        self.runs = self.ended = self.lost = self.given_up = False
        self.error: BaseException | tuple[int, Description] | None = None
        self.failures = self.suspect = 0
        self._again = 0  # how many of the tokens have come a second time, if a round failed
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    # -- in the thread of the group ------------------------------------------------------------------------------

    @property
    def is_suspect(self) -> bool:
        return self._again < self.suspect

    @property
    def needs_solitude(self) -> bool:
        return self.failures > 1 and self.is_suspect

    def take(self, tokens: list[int]) -> None:
        """Take tokens that the ranks have chosen."""
        for token in tokens:
            if self._again < len(self.tokens) and self.tokens[self._again] != token:
                self.end(DivergedError("after a round that failed for another call, this call's tokens were others"))
                return
            if self._again == len(self.tokens):
                self.tokens.append(token)
            self._again += 1

    def end(self, error: BaseException | tuple[int, Description] | None = None) -> None:
        self.error = self.error or error
        self.ended = True

    def begin_again(self, error: BaseException, suspected: bool) -> bool:
        """After a round that failed: begin again at the prompt. Returns whether it may; else it has ended.

        Args:
            error: error of the round.
            suspected: this call may be why.
        """
        self.failures += suspected
        if self.failures >= _MOST_FAILURES or self.call.objects is not None:  # whose state has moved on
            self.end(error)
            return False
        self.suspect = len(self.tokens) + 1 if suspected else 0
        self._again = 0
        self.runs = False
        return True

    def ring(self) -> None:
        """Have the caller look. Any thread may."""
        self._bell.put(None)

    # -- in the caller's -----------------------------------------------------------------------------------------

    def wait(self, end: float, on_tokens: Callable[[list[int]], object] | None) -> torch.Tensor | None:
        """Wait for the tokens.

        Args:
            end: until when, on the clock of `time.monotonic`, in seconds.
            on_tokens: called with new tokens as they come.

        Returns:
            Prompt and tokens, int64 `[1, tokens]`; None if the call is `lost`.

        Raises:
            DeadlineExpiredError, RequestTimeoutError: the time passed, before the ranks were asked or after.
            RequestCancelledError: another thread has cancelled it.
            GroupError: the row, or the whole batch, has ended.
        """
        cancellation = cancellation_of_thread()
        cancellation.wake = self.ring
        told, ids = 0, self.call.prompt
        while True:
            cancellation.check()
            ended = self.ended  # first: nothing comes after it
            while self.states:
                self.call.restore(unpack(*self.states.popleft()))
            before, ids, is_last = ids, *self.call.follow(ids, self.tokens[told:])
            told = ids.shape[1] - self.call.prompt.shape[1]
            if on_tokens is not None and ids is not before:
                on_tokens(ids[0, before.shape[1] :].tolist())
            if is_last:
                return ids
            if ended:
                if self.error is None:
                    return ids
                raise rebuild(*self.error) if isinstance(self.error, tuple) else self.error
            if self.lost:
                return None
            try:
                self._bell.get(timeout=min(max(end - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
            except queue.Empty:
                if not self.runs and not told:
                    text = "'generate' did not get its turn in the batch before its deadline"
                    raise DeadlineExpiredError(text) from None
                raise RequestTimeoutError(f"'generate' ran past its deadline with {told} tokens") from None
