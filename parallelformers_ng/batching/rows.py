"""The rows that a rank decodes together. Every rank has the same rows, and is told the same of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching import row_caches
from parallelformers_ng.batching.captured_rows import CapturedRows
from parallelformers_ng.batching.penalties import penalized
from parallelformers_ng.batching.prefixes import Prefixes
from parallelformers_ng.batching.prepared import inputs_of
from parallelformers_ng.batching.row import ENDED, GOES_ON, BatchRow
from parallelformers_ng.batching.whole_rows import whole_logits
from parallelformers_ng.collectives.communicator import Communicator

_MOST_EMPTY = 4
"""A batch is packed anew where one in so many of its rows, or of its columns, is empty: that copies all caches."""


class Rows:
    """Sequences in one batch, aligned at their newest token, with padding before the first token of the shorter ones.

    ::

        a joins b:   · · a a a      a step:   · · a a a a      c comes in a's place:   · · · c c c
                     b b b b b                b b b b b b                              b b b b b b

    A row joins with the cache of its prompt; either side is padded to the length of the other. Masks and positions are
    each row's own, so its tokens do not depend on its company: `proof.py` sees to it for a type of model. The next
    tokens are chosen by all ranks, each for its share of the rows.

    Args:
        model: the rank's.
        communicator: the ranks; None if there is one.
        prefixes: keeps the sequences that are complete.
        captured: runs steps that are recorded; None if none are.
    """

    def __init__(
        self,
        model: Any,
        communicator: Communicator | None,
        prefixes: Prefixes,
        captured: CapturedRows | None = None,
    ) -> None:
        self._model = model
        self._communicator = communicator
        self._prefixes = prefixes
        self._captured = captured
        self._slots: list[BatchRow | None] = []
        self._cache: Any = None
        self._cache_name = ""
        self._mask = torch.ones(0, 0, dtype=torch.long, device=model.device)

    def __len__(self) -> int:
        return sum(row is not None for row in self._slots)

    def __iter__(self) -> Iterator[BatchRow]:
        return (row for row in self._slots if row is not None)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, 0 if there is no row."""
        return 0 if self._cache is None else row_caches.token_bytes(self._cache)

    def join(self, rows: list[BatchRow], logits: torch.Tensor, cache: Any, mask: torch.Tensor) -> None:
        """Take rows in whose prompts have run, and choose their first tokens.

        Args:
            logits: logits of their newest tokens, `[rows, vocabulary]`.
            cache: cache of their prompts; None if every step runs whole sequences.
            mask: `[rows, columns]`, 0 if the cache has padding.

        Raises:
            BatchingError: the model keeps a cache that no row can be added to.
        """
        self._choose(rows, logits)
        if cache is None:
            self._slots = [*filter(None, self._slots), *rows]
            self.leave([row.number for row in rows if row.outcome != GOES_ON])
            return
        self._cache_name = row_caches.name_in(rows[0].call.model_kwargs)
        if self._slots:
            self._place(rows, cache, mask)
        else:
            self._slots, self._cache, self._mask = [*rows], cache, mask
        self.leave([row.number for row in rows if row.outcome != GOES_ON])

    def _place(self, rows: list[BatchRow], cache: Any, mask: torch.Tensor) -> None:
        """Put rows where others have left, and behind the last."""
        slot_count, columns = len(self._slots), max(self._mask.shape[1], mask.shape[1])
        free = [index for index, row in enumerate(self._slots) if row is None]
        free = [*free, *range(slot_count, slot_count + len(rows))][: len(rows)]
        count = max(slot_count, free[-1] + 1)
        self._slots += [None] * (count - slot_count)
        self._mask = pad(self._mask, (columns - self._mask.shape[1], 0, 0, count - slot_count))
        self._mask[free] = pad(mask, (columns - mask.shape[1], 0))
        row_caches.put_rows(self._cache, cache, free, count, columns)
        for index, row in zip(free, rows, strict=True):
            self._slots[index] = row

    def step(self, positions: int = 0) -> list[BatchRow]:
        """Choose one more token for each row.

        Args:
            positions: rows × tokens of caches over which steps are recorded; 0 if none are to be.

        Returns:
            The rows, also those that ended with it and have left.
        """
        if self._cache is None:
            if positions and self._captured is not None:
                self._captured.reason = "the model keeps nothing between steps"
            rows = [row for row in self._slots if row is not None]
            self._choose(rows, whole_logits(self._model, rows))
            self.leave({row.number for row in rows if row.outcome != GOES_ON})
            return rows
        self._pack()
        newest = self._mask.new_tensor([[0 if row is None else row.newest] for row in self._slots])
        self._mask = pad(self._mask, (0, 1), value=1)
        logits = self._forward(newest, positions).logits[:, -1]
        at = [index for index, row in enumerate(self._slots) if row is not None]
        rows = [row for row in self._slots if row is not None]
        self._choose(rows, logits if len(rows) == len(self._slots) else logits[at])
        for index, row in zip(at, rows, strict=True):
            if row.outcome == ENDED and row.may_be_kept:
                self._prefixes.keep(row.ids[:, :-1], self._cache, index)  # a conversation may go on with it
        self.leave({row.number for row in rows if row.outcome != GOES_ON})
        return rows

    def _forward(self, newest: torch.Tensor, positions: int) -> Any:
        """Run the model for one more token of each row."""

        def inputs(cache: Any) -> dict[str, Any]:
            arguments = {"attention_mask": self._mask, "use_cache": True, self._cache_name: cache}
            return inputs_of(self._model, newest, self._mask.sum(-1, keepdim=True) - 1, **arguments) | {
                "return_dict": True
            }

        output = None
        if positions and self._captured is not None:
            rows, columns = self._mask.shape
            output = self._captured.run(self._cache, (rows, columns), positions, inputs)
        return self._model(**inputs(self._cache)) if output is None else output

    def leave(self, numbers: Collection[int]) -> None:
        """Let rows go."""
        self._slots = [None if row is None or row.number in numbers else row for row in self._slots]
        if not any(self._slots):
            self._slots, self._cache = [], None

    def _choose(self, rows: list[BatchRow], logits: torch.Tensor) -> None:
        """Choose the tokens of this rank's share of the rows; then exchange them."""
        rank, ranks = (0, 1) if self._communicator is None else (self._communicator.rank, self._communicator.world_size)
        own = {index: logits[index : index + 1] for index, row in enumerate(rows) if row.number % ranks == rank}
        if at := [index for index in own if rows[index].call.penalties is not None]:
            penalties = [each for index in at if (each := rows[index].call.penalties) is not None]
            scores = penalized(logits[at].float(), [rows[index].ids[0] for index in at], penalties)
            own.update(zip(at, scores.split(1), strict=True))
        mine = [row.choose(own[index]) if index in own else (0, 0) for index, row in enumerate(rows)]
        chosen = self._mask.new_tensor([mine])
        if self._communicator is not None:
            chosen = self._communicator.all_gather(chosen, 0)
        for row, each in zip(rows, chosen.transpose(0, 1).tolist(), strict=True):
            row.take(*each[row.number % ranks])

    def _pack(self) -> None:
        """Drop empty rows and columns if there are too many."""
        full = [index for index, row in enumerate(self._slots) if row is not None]
        first = int(self._mask[full].any(0).to(torch.uint8).argmax())
        rows, columns = self._mask.shape
        if (rows - len(full)) * _MOST_EMPTY < rows and first * _MOST_EMPTY < columns:
            return
        self._slots = [self._slots[index] for index in full]
        self._mask = self._mask[full, first:]
        row_caches.keep_rows(self._cache, full, self._mask.shape[1])
