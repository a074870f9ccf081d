"""Applies repetition, presence and frequency penalties and a token bias to all rows of a batch in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Penalties:
    """The changes of the scores of one sequence's next token, in vLLM's order (`vllm/v1/sample/sampler.py`).

    1. Add `bias`.
    2. Divide the positive scores of tokens in the prompt or the answer by `repetition`, and multiply the negative
       scores of such tokens by `repetition` (https://arxiv.org/abs/1909.05858).
    3. Subtract `presence + frequency * n` from the score of a token that occurs n > 0 times in the answer.

    An object is a logits processor for `generate`. A batch applies the penalties of all rows at once, before other
    processors.

    Attributes:
        start: number of prompt tokens.
        presence: penalty on every token of the answer.
        frequency: penalty on each occurrence of a token in the answer.
        repetition: factor for the tokens of prompt and answer; 1 for no penalty.
        bias: pairs of a token and the number to add to its score.
    """

    start: int
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return penalized(scores, [input_ids[0]], [self])


def penalized(scores: torch.Tensor, sequences: Sequence[torch.Tensor], penalties: Sequence[Penalties]) -> torch.Tensor:
    """Apply each row's penalties to the scores of its next token, float32 `[rows, vocabulary]`, and return new scores.
    Each sequence has the tokens of prompt and answer, int64 `[tokens]`."""
    rows, vocab_size = scores.shape
    scores = scores.clone()
    flat = scores.view(-1)
    settings = [number for each in penalties for number in (each.repetition, each.presence, each.frequency)]
    biased = [(row * vocab_size + token, value) for row, each in enumerate(penalties) for token, value in each.bias]
    numbers = torch.tensor(settings + [number for pair in biased for number in pair], dtype=torch.float64)
    numbers = numbers.to(flat.device)  # one copy to the device; float64 holds indices exactly
    repetition, presence, frequency = numbers[: len(settings)].to(flat.dtype).view(rows, 3).unbind(1)
    if biased:
        places, values = numbers[len(settings) :].view(-1, 2).unbind(1)
        flat.index_add_(0, places.long(), values.to(flat.dtype))
    base = torch.arange(rows, device=flat.device) * vocab_size
    # Below, an index may occur several times, always with the same value. The host would have to wait to drop
    # duplicates.
    if any(each.repetition != 1 for each in penalties):
        places = torch.cat([sequence + base[row] for row, sequence in enumerate(sequences)])
        old, factors = flat[places], repetition[places // vocab_size]
        flat[places] = torch.where(old < 0, old * factors, old / factors)
    if any(each.presence or each.frequency for each in penalties):
        answers = [
            sequence[each.start :] + base[row]
            for row, (sequence, each) in enumerate(zip(sequences, penalties, strict=True))
        ]
        places = torch.cat(answers)
        ordered, row = places.sort().values, places // vocab_size
        counts = torch.searchsorted(ordered, places, right=True) - torch.searchsorted(ordered, places)
        flat[places] = flat[places] - (presence[row] + frequency[row] * counts)
    return scores
