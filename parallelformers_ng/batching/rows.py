"""Decodes the rows of a batch together on a rank. Every rank has the same rows and the same tokens."""

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
"""If one in 4 rows or columns is empty, the batch drops the empty rows and columns, which copies all caches."""


class Rows:
    """The sequences of one batch, aligned at their newest token. Shorter sequences have padding before the first token.

    ::

        a joins b:   · · a a a      a step:   · · a a a a      c comes in a's place:   · · · c c c
                     b b b b b                b b b b b b                              b b b b b b

    A row joins with the cache of its prompt; the shorter of the two caches is padded. Each row has its own mask and
    positions, so the tokens of a row do not depend on other rows. `batch_proof.py` checks this for each model. Every
    rank chooses the next tokens of a share of the rows.

    Args:
        model: model of the rank.
        communicator: connection to the other ranks; None for one rank.
        prefixes: store that keeps complete sequences.
        captured: runner of recorded steps; None for no recordings.
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
        """Bytes of the keys and values of one token; 0 without a row."""
        return 0 if self._cache is None else row_caches.token_bytes(self._cache)

    def join(self, rows: list[BatchRow], logits: torch.Tensor, cache: Any, mask: torch.Tensor) -> None:
        """Add rows after their prefill, and choose their first new tokens.

        Args:
            rows: the new rows.
            logits: logits of the last token of each prompt, `[rows, vocabulary]`.
            cache: cache of the prompts; None if the model runs whole sequences at every step.
            mask: mask of the cache, `[rows, columns]`: 0 for padding, 1 for tokens. The data type is int64, or for one
                row that of `BatchRow.prompt_mask`.

        Raises:
            BatchingError: rows cannot be added to a cache of this model.
            CollectiveAbortedError, DivergedError: see `Communicator.all_gather`.
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
        """Put new rows into empty slots, and then after the last slot."""
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
            positions: most rows × tokens of a cache whose steps are recorded; 0 for no recordings.

        Returns:
            The rows, including rows that ended in this step and have left.

        Raises:
            BatchingError: an argument of a model without a cache cannot be padded.
        """
        if self._cache is None:
            if positions and self._captured is not None:
                self._captured.reason = "the model has no cache"
            rows = [row for row in self._slots if row is not None]
            self._choose(rows, whole_logits(self._model, rows))
            self.leave({row.number for row in rows if row.outcome != GOES_ON})
            return rows
        self._pack()
        newest = self._mask.new_tensor([[0 if row is None else row.newest] for row in self._slots])
        self._mask = pad(self._mask, (0, 1), value=1)
        logits = self._forward(newest, positions).logits[:, -1]
        full = [index for index, row in enumerate(self._slots) if row is not None]
        rows = [row for row in self._slots if row is not None]
        self._choose(rows, logits if len(rows) == len(self._slots) else logits[full])
        for index, row in zip(full, rows, strict=True):
            if row.outcome == ENDED and row.may_be_kept:
                self._prefixes.keep(row.ids[:, :-1], self._cache, index)  # the next prompt may begin with this sequence
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
        """Remove the rows with the given numbers; without a row, drop the cache."""
        self._slots = [None if row is None or row.number in numbers else row for row in self._slots]
        if not any(self._slots):
            self._slots, self._cache = [], None

    def _choose(self, rows: list[BatchRow], logits: torch.Tensor) -> None:
        """Choose the next tokens of this rank's share of the rows, and gather the tokens of all ranks."""
        rank, ranks = (0, 1) if self._communicator is None else (self._communicator.rank, self._communicator.world_size)
        own = [index for index, row in enumerate(rows) if row.number % ranks == rank]
        mine = [(0, 0)] * len(rows)
        if greedy := [index for index in own if rows[index].greedy is not None]:
            for index, token in zip(greedy, _of(logits, greedy).max(-1).indices.tolist(), strict=True):
                mine[index] = token, rows[index].after(token)
        scores = {index: logits[index : index + 1] for index in own if rows[index].greedy is None}
        if penalized_rows := [index for index in scores if rows[index].call.penalties is not None]:
            penalties = [each for index in penalized_rows if (each := rows[index].call.penalties) is not None]
            sequences = [rows[index].ids[0] for index in penalized_rows]
            changed = penalized(logits[penalized_rows].float(), sequences, penalties)
            scores.update(zip(penalized_rows, changed.split(1), strict=True))
        for index, of_row in scores.items():
            mine[index] = rows[index].choose(of_row)
        chosen = self._mask.new_tensor([mine])
        if self._communicator is not None:
            chosen = self._communicator.all_gather(chosen, 0)
        for row, outcomes in zip(rows, chosen.transpose(0, 1).tolist(), strict=True):
            row.take(*outcomes[row.number % ranks])

    def _pack(self) -> None:
        """Drop empty rows and columns if at least one in 4 rows or columns is empty."""
        full = [index for index, row in enumerate(self._slots) if row is not None]
        first = int(self._mask[full].any(0).to(torch.uint8).argmax())
        rows, columns = self._mask.shape
        if (rows - len(full)) * _MOST_EMPTY < rows and first * _MOST_EMPTY < columns:
            return
        self._slots = [self._slots[index] for index in full]
        self._mask = self._mask[full, first:]
        row_caches.keep_rows(self._cache, full, self._mask.shape[1])


def _of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return the rows of `logits` with the given indices, without a copy if the indices have one stride."""
    stride = rows[1] - rows[0] if len(rows) > 1 else 1
    is_range = rows == list(range(rows[0], rows[0] + stride * len(rows), stride))
    return logits[rows[0] : rows[-1] + 1 : stride] if is_range else logits[rows]
