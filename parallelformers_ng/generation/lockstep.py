"""Keeps ranks together while `generate` runs, and lets the caller stop all of them at the same step."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StoppingCriteria

from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.errors import DivergedError, RequestCancelledError


class LockStep(StoppingCriteria):
    """Asked by `generate` after every token; never ends a sequence itself.

    Each step the ranks tell each other a fingerprint of the tokens just chosen and whether they saw a cancellation. A
    rank may see it later than another, so all go by what any of them saw.

    Args:
        communicator: the ranks.
        sequence: number of the request, the one that the parent cancels.
    """

    def __init__(self, communicator: Communicator, sequence: int) -> None:
        self._communicator = communicator
        self._sequence = sequence
        self._weights: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        cancelled = self._communicator.cancel_sequence() == self._sequence
        mine = torch.tensor([int(cancelled), self._fingerprint(input_ids)])
        if input_ids.device.type == "cuda":
            mine = mine.to(input_ids.device)
        seen = self._communicator.all_gather(mine).view(-1, 2).tolist()
        if any(flag for flag, _ in seen):
            raise RequestCancelledError("the request was cancelled by its caller")
        if any(fingerprint != seen[0][1] for _, fingerprint in seen):
            raise DivergedError(
                f"the ranks chose different tokens at length {input_ids.shape[-1]}; the answer was discarded"
            )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def _fingerprint(self, input_ids: torch.Tensor) -> int:
        """A number that differs, but for chance, where the newest tokens differ: Σ (row + 1) · 1000003 · token mod
        2⁶³."""
        newest = input_ids[:, -1]
        if self._weights is None or len(self._weights) != len(newest):
            self._weights = torch.arange(1, len(newest) + 1, device=newest.device) * 1000003
        return int((newest * self._weights).sum())
