"""Beginnings of sequences whose keys and values are kept: a prompt that begins alike need not run that part again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from parallelformers_ng.batching.row_caches import keeps_all, layers_of

LEAST_TOKENS = 16
"""Shorter beginnings cost less to run than to look after."""


@dataclass(eq=False)
class _Kept:
    """Tokens `[tokens]`, and the keys and values of each layer, `[1, heads, tokens, width]`."""

    ids: torch.Tensor
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class Prefixes:
    """The sequences that were used last. All ranks keep the same.

    Args:
        limit: tokens that they may have together.
        least: tokens that make it worth while.
    """

    def __init__(self, limit: int, least: int = LEAST_TOKENS) -> None:
        self._limit = limit
        self._least = least
        self._kept: list[_Kept] = []  # the one used last comes last

    def forget(self) -> None:
        """Let all sequences go."""
        self._kept.clear()

    def length(self, ids: torch.Tensor) -> int:
        """With how many of its tokens, all but one at most, a prompt `[1, tokens]` begins like one that is kept."""
        return self._best(ids)[0]

    def fill(self, cache: Any, ids: torch.Tensor) -> int:
        """Put the beginning of a prompt into its cache, which is empty. Returns its tokens."""
        length, kept = self._best(ids)
        if kept is None or not keeps_all(cache):
            return 0
        self._kept.remove(kept)
        self._kept.append(kept)
        for layer, (keys, values) in zip(layers_of(cache), kept.layers, strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys[:, :, :length], values[:, :, :length]  # what follows makes copies of them
        return length

    def keep(self, ids: torch.Tensor, cache: Cache, row: int) -> None:
        """Keep a sequence, in place of those that it begins with.

        Args:
            ids: `[1, tokens]`.
            cache: has it at the end of a row.
            row: the row whose prompt it is.
        """
        tokens = ids.shape[1]
        if not self._least <= tokens <= self._limit or not keeps_all(cache) or self._best(ids)[0] == tokens - 1:
            return
        layers = [
            tuple(
                states[row : row + 1, :, states.shape[-2] - tokens :].clone() for states in (layer.keys, layer.values)
            )
            for layer in layers_of(cache)
        ]
        self._kept = [kept for kept in self._kept if _common(kept.ids, ids[0]) < len(kept.ids)]
        self._kept.append(_Kept(ids[0].clone(), layers))
        while sum(len(kept.ids) for kept in self._kept) > self._limit:
            del self._kept[0]

    def _best(self, ids: torch.Tensor) -> tuple[int, _Kept | None]:
        lengths = [_common(kept.ids, ids[0, :-1]) for kept in self._kept]
        longest = max(lengths, default=0)
        return (longest, self._kept[lengths.index(longest)]) if longest >= self._least else (0, None)


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    """With how many equal tokens two sequences begin."""
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
