"""A sequence that grows: how its next token is chosen, and when it ends."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch

from parallelformers_ng.batching.prepared import Prepared
from parallelformers_ng.batching.row_caches import name_in
from parallelformers_ng.generation.lockstep import OwnStream
from parallelformers_ng.generation.object_state import ObjectState
from parallelformers_ng.runtime.failures import Description, describe

GOES_ON, ENDED, FAILED = range(3)


@dataclass(eq=False)
class BatchRow:
    """One call of `generate` on a rank.

    Attributes:
        number: the caller's name for it.
        call: how its next token is chosen, and when it ends.
        random: generator of its own, None if it has none.
        objects: mutable parts of the caller's processors and criteria; None without any.
        ids: the prompt and the tokens so far, int64 `[1, tokens]`.
        newest: the last of them.
        told: how many of its tokens the caller has.
        outcome: GOES_ON, ENDED or FAILED.
        failure: exception on the rank that chose.
        may_be_kept: whether its keys and values may serve later prompts: all tokens of its prompt count, and the model
            has been the same since it began.
    """

    number: int
    call: Prepared
    random: OwnStream | None = None
    objects: ObjectState | None = None
    ids: torch.Tensor = field(init=False)
    newest: int = field(init=False)
    told: int = field(init=False)
    may_be_kept: bool = field(init=False)
    outcome: int = GOES_ON
    failure: Description | None = None

    def __post_init__(self) -> None:
        self.ids = self.call.input_ids
        self.newest = int(self.ids[0, -1])
        self.told = self.ids.shape[1]
        self.may_be_kept = self.prompt_is_plain
        if self.objects is not None:
            self.objects.remember()

    @property
    def cache(self) -> Any:
        """Mask of its prompt; None if the model makes it itself or uses none."""
        return self.call.model_kwargs.get(name_in(self.call.model_kwargs))

    @property
    def prompt_mask(self) -> torch.Tensor:
        """Return the tokens of the prompt that count, `[1, tokens]`: `generate` takes pad tokens for padding."""
        mask = self.call.model_kwargs.get("attention_mask")
        return torch.ones_like(self.call.input_ids) if mask is None else mask

    @property
    def prompt_is_plain(self) -> bool:
        """Whether all tokens of the prompt count."""
        return bool(self.prompt_mask.all())

    def choose(self, logits: torch.Tensor) -> tuple[int, int]:
        """Choose the next token as transformers' own loop does.

        Args:
            logits: logits of the newest token, `[1, vocabulary]`.

        Returns:
            The token, and what becomes of the row with it.
        """
        try:
            with self.random or contextlib.nullcontext():
                scores = self.call.processors(self.ids, logits.to(copy=True, dtype=torch.float32))
                if self.call.config.do_sample:
                    token = torch.multinomial(scores.softmax(-1), num_samples=1)
                else:
                    token = scores.argmax(-1, keepdim=True)
            ended = bool(self.call.criteria(torch.cat((self.ids, token), -1), scores)[0])
        except Exception as error:  # of a processor or a criterion: its row's alone
            self.failure = describe(error)
            return 0, FAILED
        return int(token), ENDED if ended else GOES_ON

    def take(self, token: int, outcome: int) -> None:
        """Take over the token of the rank that chose."""
        self.outcome = outcome
        if outcome != FAILED:
            self.ids = torch.cat((self.ids, self.ids.new_tensor([[token]])), -1)
            self.newest = token

    def news(self) -> list[int]:
        """Return the tokens that the caller has not been told of."""
        new: list[int] = self.ids[0, self.told :].tolist()
        self.told = self.ids.shape[1]
        return new

    def changes(self) -> dict[int, Any]:
        """New states of parts of the caller's objects that have changed since the caller was told of them."""
        if self.objects is None or not (changes := self.objects.changes()):
            return {}
        self.objects.remember()
        return changes
