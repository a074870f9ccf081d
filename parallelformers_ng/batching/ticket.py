"""A call of `generate` that waits in the caller for its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from parallelformers_ng.batching.rounds import News, Round
from parallelformers_ng.batching.sharing import SharedCall
from parallelformers_ng.errors import DivergedError

Send = Callable[[Round], list[News]]
"""Has the ranks of a model run a round. Returns what each of them says."""

_MOST_FAILURES = 3


@dataclass(eq=False)
class Ticket:
    """What a queue knows of one call. The fields belong to the queue's lock.

    Attributes:
        call: what was asked for.
        send: sends rounds, for all that run meanwhile. It may hold the model, for a queue holds it no longer than the
            call.
        tokens: chosen so far.
        states: what has become of the call's processors and criteria since it looked last.
        ended: no more will come.
        error: why, where it did not end well.
        given_up: nobody waits for it any more.
        failures: rounds that failed while it was suspected.
        suspect: until this many tokens have come. A suspect shares rounds with no other, and the second time with no
            other row at all, so that it fails alone if it does.
    """

    call: SharedCall
    send: Send
    tokens: list[int] = field(default_factory=list)
    states: list[dict[int, Any]] = field(default_factory=list)
    ended: bool = False
    error: BaseException | None = None
    given_up: bool = False
    failures: int = 0
    suspect: int = 0
    _again: int = 0  # how many of the tokens have come a second time, where a round failed

    @property
    def is_suspect(self) -> bool:
        return self._again < self.suspect

    @property
    def needs_solitude(self) -> bool:
        return self.failures > 1 and self.is_suspect

    def take(self, tokens: list[int]) -> None:
        """Tokens that the ranks have chosen."""
        for token in tokens:
            if self._again < len(self.tokens) and self.tokens[self._again] != token:
                self.end(DivergedError("after a round that failed for another call, this call's tokens were others"))
                return
            if self._again == len(self.tokens):
                self.tokens.append(token)
            self._again += 1

    def end(self, error: BaseException | None = None) -> None:
        self.ended, self.error = True, self.error or error

    def begin_again(self, error: BaseException, suspected: bool) -> bool:
        """After a round that failed: begin again at the prompt. Returns whether it may; else it has ended.

        Args:
            error: what the round failed with.
            suspected: this call may be why.
        """
        self.failures += suspected
        if self.failures >= _MOST_FAILURES or self.call.objects is not None:  # whose state has moved on
            self.end(error)
            return False
        self.suspect = len(self.tokens) + 1 if suspected else 0
        self._again = 0
        return True
