"""Penalties on tokens of a sequence, and a bias on tokens, for all rows of a batch in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes of the scores of one sequence's next token, in vLLM's order.

    1. `bias` is added.
    2. Scores of tokens that the sequence has, prompt included, are divided by `repetition` if they are positive, else
       multiplied by it (https://arxiv.org/abs/1909.05858).
    3. A token that the answer has n times, n > 0, loses `presence + frequency * n`.

    `generate` takes it as a logits processor. A batch applies those of all its rows at once, before other processors.

    Attributes:
        start: tokens of the sequence before its answer.
        presence: penalty on tokens of the answer.
        frequency: penalty on each occurrence of a token in the answer.
        repetition: factor of tokens of the sequence; 1 for none.
        bias: tokens, and what is added to their scores.
    """

    start: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return penalized(scores, [input_ids[0]], [self])


def penalized(scores: torch.Tensor, sequences: Sequence[torch.Tensor], penalties: Sequence[Penalties]) -> torch.Tensor:
    """Return new scores of the next token of each row.

    Args:
        scores: float32 `[rows, vocabulary]`.
        sequences: prompt and answer so far of each row, int64 `[tokens]`.
        penalties: penalties of each row.
    """
    rows, words = scores.shape
    scores = scores.clone()
    flat = scores.view(-1)
    biased = [(row * words + token, value) for row, each in enumerate(penalties) for token, value in each.bias]
    if biased:
        places, values = zip(*biased, strict=True)
        flat.index_add_(0, torch.tensor(places, device=flat.device), flat.new_tensor(values))
    base = torch.arange(rows, device=flat.device) * words
    if any(each.repetition != 1 for each in penalties):
        places = torch.cat([sequence + base[row] for row, sequence in enumerate(sequences)]).unique()
        factors = flat.new_tensor([each.repetition for each in penalties])[places // words]
        flat[places] = torch.where(flat[places] < 0, flat[places] * factors, flat[places] / factors)
    if any(each.presence or each.frequency for each in penalties):
        answers = [
            sequence[each.start :] + base[row]
            for row, (sequence, each) in enumerate(zip(sequences, penalties, strict=True))
        ]
        places, counts = torch.cat(answers).unique(return_counts=True)
        row = places // words
        presence, frequency = (
            flat.new_tensor([getattr(each, name) for each in penalties])[row] for name in ("presence", "frequency")
        )
        flat[places] -= presence + frequency * counts
    return scores
