"""Records the probabilities of an answer's tokens. Ranks import this file, so this file must not import the server."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from transformers import LogitsProcessor


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of one token of an answer.

    Attributes:
        token: id of the token.
        logprob: natural logarithm of the token's probability.
        top: ids and log-probabilities of the most likely tokens, most likely first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Recorder(LogitsProcessor):
    """Logits processor that records the log-probabilities of a sequence and does not change the scores.

    The processor takes one sequence, with ids `[1, tokens]` and scores `[1, vocabulary]`. The ranks return the recorded
    values to the caller with the tokens.

    Attributes:
        alternatives: number of most likely tokens to record at each position.
        top: ids and log-probabilities of the most likely tokens at each position, most likely first.
        chosen: log-probability of the chosen token at each position, except the newest position.
        last: log-probabilities of all tokens at the newest position, float32 `[vocabulary]`; None before the first.
    """

    alternatives: int
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    chosen: list[float] = field(default_factory=list)
    last: torch.Tensor | None = None  # log-probabilities of the newest position, which has no chosen token yet

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            self.chosen.append(float(self.last[input_ids[0, -1]]))
        self.last = scores[0].float().log_softmax(-1)
        self.top.append(likeliest(self.last, self.alternatives))
        return scores

    def of(self, place: int, token: int) -> Likelihood:
        """Return the likelihood of the token at a position; position 0 is the first new token.

        Args:
            place: recorded position, below `len(self.top)`.
            token: id of the chosen token.
        """
        if place < len(self.chosen):
            return Likelihood(token, self.chosen[place], self.top[place])
        assert self.last is not None
        return Likelihood(token, float(self.last[token]), self.top[place])


def likeliest(logprobs: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """Return ids and log-probabilities of the most likely tokens, most likely first.

    Args:
        logprobs: log-probability of each token, `[vocabulary]`.
        count: number of tokens to return; a larger number than the vocabulary's size returns all tokens.
    """
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return list(zip(tokens.tolist(), values.tolist(), strict=True))
