"""Chooses the next token of one sequence of a batch, and checks whether the sequence has ended."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from parallelformers_ng.batching.prepared import Prepared
from parallelformers_ng.batching.row_caches import name_in
from parallelformers_ng.generation.lockstep import OwnStream
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.runtime.failures import Description, describe

GOES_ON, ENDED, FAILED = range(3)

_CALLS = {each: each.__call__ for each in (StoppingCriteriaList, EosTokenCriteria, MaxLengthCriteria)}
"""Stopping criteria that only need the newest token and the length → their original methods, to detect patched ones."""


@dataclass(frozen=True)
class GreedyCall:
    """Settings of a call that takes the token with the largest logit, and ends at a length or at certain tokens."""

    length: float  # number of tokens, prompt included, at which the call ends
    end_tokens: frozenset[int]  # tokens that end the call

    @staticmethod
    def read(call: Prepared) -> GreedyCall | None:
        """Return the settings of a greedy call; None if the call samples, or has processors or unknown criteria."""
        criteria = (call.criteria, *call.criteria)
        if call.config.do_sample or call.processors or call.penalties is not None:
            return None
        if any(_CALLS.get(type(each)) is not type(each).__call__ for each in criteria):
            return None
        lengths = [each.max_length for each in call.criteria if isinstance(each, MaxLengthCriteria)]
        ends = [each.eos_token_id.tolist() for each in call.criteria if isinstance(each, EosTokenCriteria)]
        return GreedyCall(min(lengths, default=math.inf), frozenset(token for each in ends for token in each))


@dataclass(eq=False)
class BatchRow:
    """One call of `generate` on a rank.

    Attributes:
        greedy: settings of a greedy call; None if the call needs transformers' processors, criteria or sampling.
        newest: last token of `ids`.
        padding: number of pad tokens before the prompt's first token.
        may_be_kept: whether later prompts may reuse the row's keys and values. The prompt must have no padding, and the
            model must not have changed since the row began.
    """

    number: int  # number by which the caller identifies the row
    call: Prepared  # prepared arguments, with logits processors and stopping criteria
    random: OwnStream | None = None  # random stream of the row; None for the rank's default generator
    # Mutable parts of the caller's processors and criteria.
    objects: ObjectState = field(default_factory=lambda: ObjectState(()))
    outcome: int = GOES_ON  # GOES_ON, ENDED or FAILED
    failure: Description | None = None  # error of a processor or criterion, on the rank that chose the token

    def __post_init__(self) -> None:
        self._ids = self.call.input_ids
        self._new: list[int] = []  # tokens that are not in `_ids` yet
        self.greedy = GreedyCall.read(self.call)
        self.newest = int(self._ids[0, -1])
        self._unsent_tokens: list[int] = []  # tokens that were not sent to the caller yet
        self.may_be_kept = self.prompt_is_plain
        self.padding = 0 if self.may_be_kept else int(self.prompt_mask[0].to(torch.uint8).argmax())

    @property
    def ids(self) -> torch.Tensor:
        """The prompt and the tokens so far, int64 `[1, tokens]`."""
        if self._new:
            self._ids, self._new = torch.cat((self._ids, self._ids.new_tensor([self._new])), -1), []
        return self._ids

    @property
    def columns(self) -> int:
        """Number of columns with keys and values, from the first token to the last token but one."""
        return self._length - 1 - self.padding

    @property
    def _length(self) -> int:
        return self._ids.shape[1] + len(self._new)

    @property
    def cache(self) -> Any:
        """KV cache of the prompt until the row joins the batch; None if `generate` has made no cache."""
        return self.call.model_kwargs.get(name_in(self.call.model_kwargs))

    def forget_cache(self) -> None:
        """Drop the prompt's KV cache after the row has joined, because the batch's cache has its keys and values."""
        self.call.model_kwargs.pop(name_in(self.call.model_kwargs), None)

    @property
    def prompt_mask(self) -> torch.Tensor:
        """Attention mask of the prompt, `[1, tokens]`: 0 for padding, 1 for tokens.

        The data type is that of the caller's mask. Without a mask of the caller, the type is int64, and `generate` sets
        0 for pad tokens.
        """
        mask = self.call.model_kwargs.get("attention_mask")
        return torch.ones_like(self.call.input_ids) if mask is None else mask

    @property
    def prompt_is_plain(self) -> bool:
        return bool(self.prompt_mask.all())

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Choose the next token from its logits, `[1, vocabulary]`, as the decoding loop of transformers does. The host
        does not wait for a device.

        Return the token, int64 `[1, 1]`, and whether the row has ended, bool `[1]`. An exception of a processor or
        criterion is not raised: the method sets `failure` and returns None.
        """
        try:
            with self.random or contextlib.nullcontext():
                scores = self.call.processors(self.ids, logits.to(copy=True, dtype=torch.float32))
                if self.call.config.do_sample:
                    token = torch.multinomial(scores.softmax(-1), num_samples=1)
                else:
                    token = scores.max(-1, keepdim=True).indices  # twice as fast as argmax on CPU
            return token, self.call.criteria(torch.cat((self.ids, token), -1), scores)[:1]
        except Exception as error:  # an error of a processor or criterion fails only this row
            self.failure = describe(error)
            return None

    def after(self, token: int) -> int:
        """Return ENDED if `token` would end this greedy call, otherwise GOES_ON."""
        assert self.greedy is not None
        return ENDED if self._length + 1 >= self.greedy.length or token in self.greedy.end_tokens else GOES_ON

    @property
    def may_go_on(self) -> bool:
        """Whether a greedy call may get at least two more tokens."""
        return self.outcome == GOES_ON and self.greedy is not None and self._length + 1 < self.greedy.length

    def take(self, token: int, outcome: int, ids: torch.Tensor | None = None) -> None:
        """Set the outcome, and add the token that one rank chose, unless the outcome is FAILED. `ids` is the token on
        the row's device, int64 `[1, 1]`, if it is there already."""
        self.outcome = outcome
        if outcome == FAILED:
            return
        self._unsent_tokens.append(token)
        self.newest = token
        if ids is None:
            self._new.append(token)
        else:
            self._ids = torch.cat((self.ids, ids), -1)

    def take_new_tokens(self) -> list[int]:
        """Return the tokens that have not been sent to the caller yet, and count them as sent."""
        tokens, self._unsent_tokens = self._unsent_tokens, []
        return tokens
