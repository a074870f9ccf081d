"""Prompts on their way into a batch: short ones run side by side, long ones in pieces, so that no row waits long."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching import row_caches
from parallelformers_ng.batching.prefixes import Prefixes
from parallelformers_ng.batching.prepared import inputs_of
from parallelformers_ng.batching.row import BatchRow
from parallelformers_ng.batching.whole_rows import runs_whole
from parallelformers_ng.errors import BatchingError

_OF_ONE_PROMPT = ("attention_mask", "position_ids", "cache_position")
_OF_THEIR_OWN = ("mems", "past_buckets_states")
"""XLNet and Reformer: their caches depend on the length of the sequence."""


@dataclass(eq=False)
class Ran:
    """Prompts that have run.

    Attributes:
        rows: whose they are.
        logits: logits of their last tokens, `[rows, vocabulary]`.
        cache: cache of all of them; None if the model runs whole sequences at every step.
        mask: `[rows, columns]`, 0 if the cache has padding.
    """

    rows: list[BatchRow]
    logits: torch.Tensor
    cache: Any
    mask: torch.Tensor


class Prompts:
    """Prompts that wait, in the order in which they came.

    Args:
        model: the rank's.
        prefixes: known beginnings of prompts, already run.
    """

    def __init__(self, model: Any, prefixes: Prefixes) -> None:
        self._model = model
        self._prefixes = prefixes
        self._waiting: deque[BatchRow] = deque()
        self._done = 0  # tokens of the first that have run

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[BatchRow]:
        return iter(self._waiting)

    def add(self, row: BatchRow) -> None:
        self._waiting.append(row)

    def leave(self, numbers: Collection[int]) -> None:
        """Let prompts go."""
        if self._waiting and self._waiting[0].number in numbers:
            self._done = 0
        self._waiting = deque(row for row in self._waiting if row.number not in numbers)

    def run(self, piece: int) -> Ran | None:
        """Run so many tokens of the first prompt, or as many whole ones as are no more, padding counted.

        Args:
            piece: tokens; 0 runs the first prompt, whole.

        Returns:
            The prompts that are done, None if the first is not.
        """
        rows = self._side_by_side(piece)
        if len(rows) > 1:
            return self._run_whole(rows)
        row = rows[0]
        length, cache = row.ids.shape[1], row.cache
        if cache is not None and not self._done and row.prompt_is_plain:
            self._done = self._prefixes.fill(cache, row.ids)
        begin, end = self._done, min(self._done + (piece or length), length)
        if end == length - 1 or row.call.config.use_cache is False:
            end = length  # a last token alone would run as a step does, where models with states round otherwise
        mask = row.prompt_mask[:, :end]
        logits = self._forward(row, row.ids[:, :end], mask, begin)
        self._done = end
        if end < length:
            return None
        self._waiting.popleft()
        self._done = 0
        cache = row.cache
        if (cache is None or not row_caches.holds_any(cache)) and runs_whole(self._model, row):
            return Ran([row], logits[:, -1], None, mask)
        if row.may_be_kept:
            self._prefixes.keep(row.ids, cache, 0)
        return Ran([row], logits[:, -1], cache, mask)

    def _side_by_side(self, piece: int) -> list[BatchRow]:
        """Return the first prompt, and those after it that may run with it."""
        if self._done:
            return [self._waiting[0]]
        rows, longest = list[BatchRow](), 0
        for row in self._waiting:
            longest = max(longest, row.ids.shape[1])
            alone = not _fits_beside(row, longest) or self._prefixes.length(row.ids)
            if rows and (alone or longest * (len(rows) + 1) > piece):
                break
            rows.append(row)
            if alone:
                break
        return rows

    def _run_whole(self, rows: list[BatchRow]) -> Ran:
        """Run prompts with padding behind the shorter ones, at which no token of theirs looks."""
        for _ in rows:
            self._waiting.popleft()
        lengths = [row.ids.shape[1] for row in rows]
        longest = max(lengths)
        empty = [longest - length for length in lengths]
        ids = torch.cat([pad(row.ids, (0, behind)) for row, behind in zip(rows, empty, strict=True)])
        last, cache = list(range(longest)), rows[0].cache
        more: dict[str, Any] = {}
        if "logits_to_keep" in rows[0].call.model_kwargs:
            last = sorted({length - 1 for length in lengths})
            more = {"logits_to_keep": ids.new_tensor(last)}
        logits = self._forward(rows[0], ids, None, 0, **more)
        at = [last.index(length - 1) for length in lengths]
        row_caches.align_ends(cache, empty)
        mask = torch.ones_like(ids)
        for index, row in enumerate(rows):
            mask[index, : empty[index]] = 0
            if row.may_be_kept:
                self._prefixes.keep(row.ids, cache, index)
        return Ran(rows, logits[range(len(rows)), at], cache, mask)

    def _forward(
        self, row: BatchRow, ids: torch.Tensor, mask: torch.Tensor | None, begin: int, **more: Any
    ) -> torch.Tensor:
        """Run prompts from a column on, into the cache of a row. Returns logits, `[rows, tokens, vocabulary]`."""
        whole = torch.ones_like(ids[:1]) if mask is None else mask
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        inputs = inputs_of(
            self._model,
            ids,
            positions[:, begin:].expand(len(ids), -1),
            next_sequence_length=ids.shape[1] - begin,
            attention_mask=mask,
            is_first_iteration=begin == 0,
            **{
                **{name: value for name, value in row.call.model_kwargs.items() if name not in _OF_ONE_PROMPT},
                **more,
            },
        )
        output = self._model(**inputs, return_dict=True)
        if row.cache is None and (name := row_caches.name_in(output)):
            row.call.model_kwargs[name] = output[name]  # it makes a cache of its own
        if name := next((name for name in _OF_THEIR_OWN if output.get(name) is not None), ""):
            raise BatchingError(f"it is not known how to add rows to {name}")
        return output.logits


def _fits_beside(row: BatchRow, longest: int) -> bool:
    """Return whether a prompt may run beside others, the longest of them `longest` tokens long. No token of it may
    be padding, and its cache must keep all tokens."""
    if row.cache is None:
        return False
    windows = [getattr(layer, "sliding_window", None) or longest + 1 for layer in row.cache.layers]
    return min(windows) > longest and row_caches.is_of_tokens_alone(row.cache) and row.prompt_is_plain
