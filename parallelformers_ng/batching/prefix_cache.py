"""Keeps keys and values of earlier sequences, so that a new prompt need not run the same first tokens again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from parallelformers_ng.batching.row_caches import keeps_all, layers_of

MIN_TOKENS = 16
"""Least tokens of a kept sequence. Shorter prefixes save less time than their bookkeeping costs."""
_COPIES = 32
"""Copying the keys and values of this many tokens takes as long as running one token of a prompt. Measured on two CPU
ranks (600M, bf16): 0.02 and 0.65 ms a token. Larger models run slower, with about as large keys and values."""


@dataclass(eq=False)
class _Sequence:
    """A kept sequence: token ids on the host, int64 `[tokens]`; the first ids as bytes, for a fast search; and each
    layer's keys and values, `[1, heads, tokens, width]`."""

    ids: torch.Tensor
    start: bytes
    layers: list[tuple[torch.Tensor, torch.Tensor]]


class PrefixCache:
    """The keys and values of the most recently used sequences; the sequences are the same on all ranks.

    Args:
        limit: most tokens of all kept sequences together.
        min_tokens: least tokens of a kept sequence and of a reused prefix.
    """

    def __init__(self, limit: int, min_tokens: int = MIN_TOKENS) -> None:
        self._limit = limit
        self._min_tokens = min_tokens
        self._sequences: list[_Sequence] = []  # the most recently used sequence is last

    def forget(self) -> None:
        self._sequences.clear()

    def length(self, ids: torch.Tensor) -> int:
        """Return how many first tokens of a prompt, int64 `[1, tokens]`, are in the cache; at most all but the last."""
        return self._best(ids)[0]

    def fill(self, cache: Any, prompts: Sequence[torch.Tensor], length: int) -> None:
        """Fill an empty cache with the kept keys and values of each prompt's first `length` tokens; each prompt gets a
        row. The sequences that have these tokens become the most recently used ones."""
        best = [self._best(ids)[1] for ids in prompts]
        sequences = [sequence for sequence in best if sequence is not None]
        used = dict.fromkeys(sequences)
        self._sequences = [*(each for each in self._sequences if each not in used), *used]
        for index, layer in enumerate(layers_of(cache)):
            keys, values = (
                torch.cat([sequence.layers[index][part][:, :, :length] for sequence in sequences]) for part in (0, 1)
            )
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values

    def keep(self, ids: torch.Tensor, cache: Cache, row: int, copies: bool = True) -> None:
        """Keep a sequence, int64 `[1, tokens]`, whose keys and values are in the last columns of a row of a cache.

        Kept sequences that are prefixes of it are dropped. Beyond `limit` tokens in total, the least recently used
        sequences are dropped, too. The method does nothing if the sequence has fewer than `min_tokens` or more than
        `limit` tokens, if `row_caches.keeps_all(cache)` is False, or if the model skips a layer, which then has no
        keys. It also does nothing if a kept sequence begins with all tokens but the last, or if running the other
        tokens again takes less time than the copy. If `copies` is False, the caller must not change the cache later.
        """
        tokens = ids.shape[1]
        if not self._min_tokens <= tokens <= self._limit or not keeps_all(cache):
            return
        if not all(layer.is_initialized for layer in layers_of(cache)):
            return
        ids = ids.cpu()
        kept = self._best(ids)[0]
        left = tokens - 1 - kept  # tokens that a longer prompt would otherwise run again
        if kept and (not left or (copies and left * _COPIES < kept)):
            return
        states = [each for layer in layers_of(cache) for each in (layer.keys, layer.values)]
        states = [each[row : row + 1, :, each.shape[-2] - tokens :] for each in states]
        if copies:
            states = _copied(states)
        layers = [*zip(states[::2], states[1::2], strict=True)]
        known = {earlier for earlier in self._alike(ids[0]) if _common(earlier.ids, ids[0]) == len(earlier.ids)}
        self._sequences = [earlier for earlier in self._sequences if earlier not in known]
        self._sequences.append(_Sequence(ids[0].clone(), self._start(ids[0]), layers))
        while sum(len(sequence.ids) for sequence in self._sequences) > self._limit:
            del self._sequences[0]

    def _best(self, ids: torch.Tensor) -> tuple[int, _Sequence | None]:
        if not self._sequences:
            return 0, None  # returns now, because `.cpu()` below waits for the device
        ids = ids[0, :-1].cpu()
        alike = self._alike(ids)
        lengths = [_common(sequence.ids, ids) for sequence in alike]
        longest = max(lengths, default=0)
        return (longest, alike[lengths.index(longest)]) if longest >= self._min_tokens else (0, None)

    def _alike(self, ids: torch.Tensor) -> list[_Sequence]:
        """Return the kept sequences that share the first `min_tokens` tokens with a prompt, int64 `[tokens]` on the
        host."""
        start = self._start(ids)
        return [sequence for sequence in self._sequences if sequence.start == start]

    def _start(self, ids: torch.Tensor) -> bytes:
        return ids[: self._min_tokens].numpy().tobytes()


def _copied(states: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy keys and values, each `[1, heads, tokens, width]`. On a device, one kernel copies all tensors of equal
    shape, because the launches of separate kernels would take longer than the copies. On the CPU, clones are twice as
    fast."""
    if states[0].device.type == "cpu" or len({each.shape for each in states}) > 1:
        return [each.clone() for each in states]
    return [*torch.cat(states).split(1)]


def _common(one: torch.Tensor, other: torch.Tensor) -> int:
    length = min(len(one), len(other))
    differ = (one[:length] != other[:length]).nonzero()
    return int(differ[0]) if len(differ) else length
