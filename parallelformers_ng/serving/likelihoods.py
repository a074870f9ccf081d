"""How likely the tokens of an answer were. The ranks note it as they choose, and import this file and no server."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LogitsProcessor


@dataclass(frozen=True)
class Likelihood:
    """How likely a token was.

    Attributes:
        token, logprob: the token, and the natural logarithm of its probability.
        top: the likeliest tokens with theirs, the first the likeliest.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


class Recorder(LogitsProcessor):
    """Notes the scores of a sequence, and leaves them as they are. What it notes comes home with the tokens.

    Args:
        alternatives: how many of the likeliest tokens are noted at each place.
    """

    def __init__(self, alternatives: int) -> None:
        self.alternatives = alternatives
        self.top: list[list[tuple[int, float]]] = []
        self.chosen: list[float] = []
        self.last: torch.Tensor | None = None  # of the newest place, whose token is not chosen yet

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.chosen.append(float(self.last[input_ids[0, -1]]))
        self.last = scores[0].float().log_softmax(-1)
        self.top.append(likeliest(self.last, self.alternatives))
        return scores

    def knows(self, place: int) -> bool:
        """Return whether it was told of a place, counted from the first new token."""
        return place < len(self.top)

    def of(self, place: int, token: int) -> Likelihood:
        """Return how likely the token at a place was."""
        if place < len(self.chosen):
            return Likelihood(token, self.chosen[place], self.top[place])
        assert self.last is not None
        return Likelihood(token, float(self.last[token]), self.top[place])


def likeliest(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens, the first the likeliest.

    Args:
        logprobs: log-probabilities of each, `[vocabulary]`.
    """
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))
