"""Pools the vectors of tokens into one vector for each text, with the modules of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")

Module = Callable[[torch.Tensor], torch.Tensor]
"""Function from vectors `[texts, width]` to vectors `[texts, new width]`."""


@dataclass(frozen=True)
class Pooling:
    """Pooling of a model's token vectors, followed by further modules.

    Attributes:
        modes: pooling modes from `MODES`, as in sentence-transformers; the vectors of several modes are concatenated.
        modules: modules that run after the pooling, in order.
        prompt: text that is put before each input.
        lower_case: whether inputs are lower-cased.
        max_tokens: maximum number of tokens in a text; None for the limit of the model.
    """

    modes: Sequence[str] = ("mean",)
    modules: Sequence[Module] = field(default_factory=lambda: [normalize])
    prompt: str = ""
    lower_case: bool = False
    max_tokens: int | None = None

    def __call__(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return one vector for each text, float32 `[texts, width]`.

        Args:
            states: output of the last layer, `[texts, tokens, width]`, padded on the right.
            mask: attention mask `[texts, tokens]`, 1 for a token and 0 for padding.
        """
        states = states.float()
        pooled = torch.cat([_pool(mode, states, mask) for mode in self.modes], -1)
        for module in self.modules:
            pooled = module(pooled)
        return pooled


def normalize(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors `[…, width]` to Euclidean length 1; zero vectors stay zero."""
    return torch.nn.functional.normalize(vectors, dim=-1)


def _pool(mode: str, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    tokens = mask[..., None].to(states.dtype)
    if mode == "cls":
        return states[:, 0]
    if mode == "lasttoken":
        return states[torch.arange(len(states)), mask.sum(1) - 1]
    if mode == "max":
        return states.masked_fill(tokens == 0, -torch.inf).amax(1)
    if mode == "weightedmean":
        tokens = tokens * torch.arange(1, states.shape[1] + 1, dtype=states.dtype)[:, None]
    counts = tokens.sum(1)
    return (states * tokens).sum(1) / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)
