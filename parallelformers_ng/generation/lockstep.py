"""Keeps ranks together while `generate` runs, and lets the caller stop all of them at the same step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import DivergedError, RequestCancelledError


class LockStep(StoppingCriteria):
    """Asked by `generate` after every token; by itself it never ends a sequence.

    Each step the ranks tell each other a fingerprint of the tokens just chosen, whether they saw a cancellation, and
    which sequences they would end. A rank may see a cancellation later than another, so all go by what any of them saw;
    and its clock may run ahead of another's, so all end the sequences that rank 0 ends.

    Args:
        communicator: the ranks.
        sequence: number of the request, the one that the parent cancels.
    """

    def __init__(self, communicator: Communicator, sequence: int) -> None:
        self._communicator = communicator
        self._sequence = sequence
        self._weights: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.agree(input_ids, torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device))

    def agree(self, input_ids: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
        """Which sequences end with the tokens just chosen, the same on every rank.

        Args:
            input_ids: all tokens so far, `[rows, length]`.
            ended: which of them this rank would end, bool `[rows]`.

        Raises:
            RequestCancelledError: the caller wishes no answer.
            DivergedError: the ranks chose different tokens.
        """
        mine = torch.empty(2 + len(ended), dtype=torch.long, device=input_ids.device)
        mine[0] = self._communicator.cancel_sequence() == self._sequence
        mine[1] = self._fingerprint(input_ids)
        mine[2:] = ended
        seen = self._communicator.all_gather(mine).view(-1, len(mine)).tolist()
        if any(rank[0] for rank in seen):
            raise RequestCancelledError("the request was cancelled by its caller")
        if any(rank[1] != seen[0][1] for rank in seen):
            raise DivergedError(
                f"the ranks chose different tokens at length {input_ids.shape[-1]}; the answer was discarded"
            )
        return torch.tensor(seen[0][2:], dtype=torch.bool, device=input_ids.device)

    def _fingerprint(self, input_ids: torch.Tensor) -> torch.Tensor:
        """A number that differs, but for chance, where the newest tokens differ: Σ (row + 1) · 1000003 · token mod
        2⁶³."""
        newest = input_ids[:, -1]
        if self._weights is None or len(self._weights) != len(newest):
            self._weights = torch.arange(1, len(newest) + 1, device=newest.device) * 1000003
        return (newest * self._weights).sum()


class AgreedCriteria(StoppingCriteriaList):
    """All criteria of one generation: its limits of length and time, its end tokens, the caller's own, and a LockStep,
    with which the ranks agree on what the others find."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        steps = [criterion for criterion in self if isinstance(criterion, LockStep)]
        others = StoppingCriteriaList(criterion for criterion in self if not isinstance(criterion, LockStep))
        ended = others(input_ids, scores, **kwargs)
        for step in steps:
            ended = step.agree(input_ids, ended)
        return ended


@contextlib.contextmanager
def agreed_criteria(model: Any) -> Iterator[None]:
    """Within it, the `generate` of this model joins all its criteria to `AgreedCriteria`."""
    join = model._get_stopping_criteria

    def join_agreed(*args: Any, **kwargs: Any) -> AgreedCriteria:
        return AgreedCriteria(join(*args, **kwargs))

    model._get_stopping_criteria = join_agreed
    try:
        yield
    finally:
        del model._get_stopping_criteria
