"""Runs the prompts of a batch: short prompts together, a long prompt in pieces, so that no row waits long."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
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
from parallelformers_ng.kernels.joint_pass import JointPass

_WORTH_A_PASS = 128
"""Kept tokens of a prompt that save more time than a forward pass of the prompt's own costs. A prompt runs beside
others if fewer of its kept tokens run again for it."""
_OF_ONE_PROMPT = ("attention_mask", "position_ids", "cache_position")
_OF_THEIR_OWN = ("mems", "past_buckets_states")
"""XLNet and Reformer: their caches depend on the length of the sequence."""


@dataclass(eq=False)
class Ran:
    """The results of prompts that ran together.

    Attributes:
        rows: rows of the prompts.
        logits: logits of each prompt's last token, `[rows, vocabulary]`.
        cache: cache of the prompts; None if the model runs whole sequences at every step.
        mask: mask of the cache, `[rows, columns]`: 0 for padding, 1 for tokens. The data type is int64, or for one row
            that of `BatchRow.prompt_mask`.
    """

    rows: list[BatchRow]
    logits: torch.Tensor
    cache: Any
    mask: torch.Tensor


class Prompts:
    """The waiting prompts, in the order of their arrival.

    Args:
        model: model of the rank.
        prefixes: kept sequences, whose keys and values new prompts may reuse.

    Attributes:
        latest: number of tokens in the latest forward pass, padding included.
        latest_begin: first column of that pass.
        ran_beside: whether the latest forward pass has run `beside`.
    """

    def __init__(self, model: Any, prefixes: Prefixes) -> None:
        self.latest, self.latest_begin, self.ran_beside = 0, 0, False
        self._model = model
        self._prefixes = prefixes
        self._waiting: deque[BatchRow] = deque()
        self._done = 0  # tokens of the first prompt that have run

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[BatchRow]:
        return iter(self._waiting)

    def add(self, row: BatchRow) -> None:
        self._waiting.append(row)

    def leave(self, numbers: Collection[int]) -> None:
        """Remove the prompts with the given row numbers."""
        if self._waiting and self._waiting[0].number in numbers:
            self._done = 0
        self._waiting = deque(row for row in self._waiting if row.number not in numbers)

    def run(self, piece: int, beside: Callable[[], object] | None = None) -> Ran | None:
        """Run one piece of the first prompt, or several whole prompts that fit in one piece with their padding.

        Tokens whose keys and values are kept from earlier sequences do not run again.

        Args:
            piece: most tokens to run; 0 runs the whole first prompt.
            beside: function that runs the model for other rows, and that runs in the same pass if possible; None for no
                rows.

        Returns:
            The results of the complete prompts; None if the first prompt has tokens left to run.

        Raises:
            BatchingError: the model keeps a cache that rows cannot be added to.
        """
        rows, kept = self._side_by_side(piece)
        if kept:
            self._prefixes.fill(rows[0].cache, [row.ids for row in rows], kept)
        if len(rows) > 1:
            return self._run_together(rows, kept, beside)
        row = rows[0]
        length = row.ids.shape[1]
        self._done = self._done or kept
        begin, left = self._done, length - self._done
        pieces = 1 if row.call.config.use_cache is False else math.ceil(left / (piece or left))
        end = begin + math.ceil(left / pieces)  # equal pieces, because a short piece reads the same weights
        mask = row.prompt_mask[:, :end]
        logits = self._forward(row, row.ids[:, :end], mask, begin, [end - 1] if end == length else [], beside)
        self._done = end
        if end < length:
            return None
        self._waiting.popleft()
        self._done = 0
        cache = row.cache
        if (cache is None or not row_caches.holds_any(cache)) and runs_whole(self._model, row):
            return Ran([row], logits, None, mask)
        return Ran([row], logits, cache, mask)

    def _side_by_side(self, piece: int) -> tuple[list[BatchRow], int]:
        """Return (rows, tokens): the rows of the first prompt and of next prompts that may run together with it.

        `tokens` is the number of kept tokens of each of these prompts. They need not run again.
        """
        first = self._waiting[0]
        if self._done:
            return [first], 0
        rows, known, longest, kept = list[BatchRow](), list[int](), 0, 0
        for row in self._waiting:
            length, tokens = max(longest, row.ids.shape[1]), self._kept(row)
            common = min([*known, tokens])
            fits = _fits_beside(row, length) and max([*known, tokens]) - common < _WORTH_A_PASS
            if rows and (not fits or (length - common) * (len(rows) + 1) > piece):
                break
            rows, known, longest, kept = [*rows, row], [*known, tokens], length, common
            if not fits:
                break
        return rows, kept

    def _kept(self, row: BatchRow) -> int:
        """Return the number of a prompt's first tokens whose keys and values are kept."""
        reuses = row.cache is not None and row.prompt_is_plain and row_caches.keeps_all(row.cache)
        return self._prefixes.length(row.ids) if reuses else 0

    def _run_together(self, rows: list[BatchRow], begin: int, beside: Callable[[], object] | None) -> Ran:
        """Run prompts from column `begin` on, with padding after the shorter prompts; no token attends to the
        padding."""
        for _ in rows:
            self._waiting.popleft()
        lengths = [row.ids.shape[1] for row in rows]
        longest = max(lengths)
        empty = [longest - length for length in lengths]
        ids = torch.cat([pad(row.ids, (0, behind)) for row, behind in zip(rows, empty, strict=True)])
        cache = rows[0].cache
        logits = self._forward(rows[0], ids, None, begin, [length - 1 for length in lengths], beside)
        row_caches.align_ends(cache, empty)
        mask = torch.ones_like(ids)
        for index, columns in enumerate(empty):
            mask[index, :columns] = 0
        return Ran(rows, logits, cache, mask)

    def _forward(
        self,
        row: BatchRow,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        begin: int,
        last: list[int],
        beside: Callable[[], object] | None,
    ) -> torch.Tensor:
        """Run prompts from column `begin` on with the cache of `row`.

        Args:
            row: row whose arguments the model gets.
            ids: the prompts, `[rows, columns]`.
            mask: mask of the prompts; None for no padding.
            begin: first column to run.
            last: column of each prompt's last token; empty if the first prompt has tokens left to run.
            beside: see `run`.

        Returns:
            Logits of the last tokens, `[rows, vocabulary]`; any tensor if `last` is empty.
        """
        whole = torch.ones_like(ids[:1]) if mask is None else mask
        self.latest, self.latest_begin, self.ran_beside = ids[:, begin:].numel(), begin, False
        positions = (whole.cumsum(-1) - 1).clamp(min=0)
        arguments = {name: value for name, value in row.call.model_kwargs.items() if name not in _OF_ONE_PROMPT}
        columns = list(range(begin, ids.shape[1]))
        if "logits_to_keep" in arguments and len(ids) > 1:
            columns = sorted(set(last))
            arguments["logits_to_keep"] = ids.new_tensor(columns) - begin
        inputs = inputs_of(
            self._model,
            ids,
            positions[:, begin:].expand(len(ids), -1),
            next_sequence_length=ids.shape[1] - begin,
            attention_mask=mask,
            is_first_iteration=begin == 0,
            **arguments,
        )
        joint = None if beside is None else JointPass.of(self._model, [column - begin for column in last])
        if joint is None or beside is None:
            output = self._model(**inputs, return_dict=True)
        elif (output := joint.run(inputs, beside)) is None:
            self.ran_beside = True
            return joint.logits
        if row.cache is None and (name := row_caches.name_in(output)):
            row.call.model_kwargs[name] = output[name]  # the model makes its own cache
        if name := next((name for name in _OF_THEIR_OWN if output.get(name) is not None), ""):
            raise BatchingError(f"rows cannot be added to the cache {name} of this model")
        logits: torch.Tensor = output.logits
        return logits[range(len(ids)), [columns.index(column) for column in last]] if len(ids) > 1 else logits[:, -1]


def _fits_beside(row: BatchRow, longest: int) -> bool:
    """Return whether a prompt may run together with other prompts, the longest of `longest` tokens.

    The prompt must have no padding, and its cache must keep the keys and values of all tokens.
    """
    if row.cache is None:
        return False
    windows = [getattr(layer, "sliding_window", None) or longest + 1 for layer in row.cache.layers]
    return min(windows) > longest and row_caches.is_of_tokens_alone(row.cache) and row.prompt_is_plain
