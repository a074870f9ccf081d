"""Decodes the rows of a batch together on a rank. Every rank has the same rows and the same tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from parallelformers_ng.batching import row_caches
from parallelformers_ng.batching.choice import Choice, Newest
from parallelformers_ng.batching.growing_rows import GrowingRows
from parallelformers_ng.batching.prefix_cache import PrefixCache
from parallelformers_ng.batching.prompts import PrefillOutput, rows_of
from parallelformers_ng.batching.row import ENDED, GOES_ON, BatchRow
from parallelformers_ng.batching.slots import CapturedRows, Slots
from parallelformers_ng.batching.whole_rows import whole_logits
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.static_caches import bucket_of
from parallelformers_ng.generation.paged_memory import may_reserve

_MAX_EMPTY = 4
"""If one in 4 rows or columns is empty, the batch drops the empty rows and columns, which copies all caches."""


@dataclass
class _Launched:
    """A decode step that was launched, and whose tokens the rows do not have yet."""

    places: dict[BatchRow, int]  # row of the step → its index in `logits`
    logits: torch.Tensor  # logits of each batch slot, `[slots, vocabulary]`
    newest: Newest | None  # chosen tokens; None on the CPU, or if not all rows are greedy


class Rows:
    """The sequences of one batch.

    A row joins with the cache of its prompt. Each row has its own mask and positions, so the tokens of a row do not
    depend on other rows. `batch_proof.py` checks this for each model. Every rank chooses the next tokens of a share of
    the rows.

    Attributes:
        token_bytes: bytes of the keys and values of one token; 0 without a row.
        pads: whether every row takes the memory of the longest row. On CPU, keys and values of all tokens are in pages.
    """

    def __init__(
        self, model: Any, communicator: Communicator | None, prefixes: PrefixCache, captured: CapturedRows | None = None
    ) -> None:
        self.token_bytes, self.pads = 0, True
        self._model = model
        self._choice = Choice(communicator)
        self._prefixes = prefixes
        self._captured = captured
        self._places: list[BatchRow | None] = []
        self._store: GrowingRows | Slots | None = None  # keys and values of the rows in `_places`
        self._newest: torch.Tensor | None = None  # newest token of each slot, int64 `[slots, 1]`, on a device
        self._ahead: _Launched | None = None  # the last step, if its rows do not have the tokens yet

    def __len__(self) -> int:
        return sum(row is not None for row in self._places)

    def __iter__(self) -> Iterator[BatchRow]:
        return (row for row in self._places if row is not None)

    def join(self, results: list[PrefillOutput]) -> list[BatchRow]:
        """Add rows whose prompts have run, put their prompts in the prefix cache, and choose their first new tokens.

        Return the rows that have new tokens: the added rows, and the rows of a step that was launched earlier.
        """
        rows, changed = rows_of(results), self._settle()
        for prefill in results:
            for index, row in enumerate(prefill.rows):
                if row.may_be_kept and prefill.cache is not None:
                    # Copy from a cache that becomes the cache of the batch, because the batch changes it. Also copy
                    # from a cache of several rows: a view of one row would keep the memory of all rows.
                    grows = prefill is results[0] and self._store is None
                    self._prefixes.keep(row.ids, prefill.cache, index, copies=grows or len(prefill.rows) > 1)
        self._choice.choose(rows, torch.cat([prefill.logits for prefill in results]), [*range(len(rows))])
        for prefill in results:
            self._place(prefill)
        self._newest = None
        self.leave([row.number for row in rows if row.outcome != GOES_ON])
        return [*changed, *rows]

    def _place(self, prefill: PrefillOutput) -> None:
        if prefill.cache is None:
            self._places = [*self, *prefill.rows]
        elif self._store is None:
            name = row_caches.name_in(prefill.rows[0].call.model_kwargs)
            self._places, self._store = [*prefill.rows], GrowingRows(self._model, name, prefill.cache, prefill.mask)
            self.token_bytes = row_caches.token_bytes(prefill.cache)
            is_paged = self._model.device.type == "cpu" and may_reserve() and row_caches.keeps_all(prefill.cache)
            self.pads = not is_paged
        else:
            self._put(self._store, prefill)
        for row in prefill.rows:
            row.forget_cache()

    def _put(self, store: GrowingRows | Slots, prefill: PrefillOutput) -> None:
        if isinstance(store, Slots) and not store.may_put(prefill.mask.shape[1], len(self) + len(prefill.rows)):
            store = self._pack(store)
        before = len(self._places)
        free = [index for index, row in enumerate(self._places) if row is None]
        free = [*free, *range(before, before + len(prefill.rows))][: len(prefill.rows)]
        self._places += [None] * (free[-1] + 1 - before)
        for index, row in zip(free, prefill.rows, strict=True):
            self._places[index] = row
        if isinstance(store, Slots):
            store.put(prefill.cache, prefill.mask, free)
            self._fill_bucket()
        else:
            store.put(prefill.cache, prefill.mask, free, len(self._places))

    def run(self, steps: int, positions: int = 0, max_rows: int = 1) -> list[BatchRow]:
        """Choose up to `steps` more tokens for each row; fewer if no row is left. Return the rows that have new tokens,
        including rows that ended and have left.

        On a device, the CUDA graph of greedy rows is launched before the host reads the tokens of the step before, so
        that the device does not wait for Python. A row that ends meanwhile ignores the token of the later step. If rows
        may go on after the last step, its tokens come with the next call of `run` or `join`.

        `positions` is the most rows × tokens of a cache whose steps become CUDA graphs; 0 for no CUDA graphs.
        """
        changed = list[BatchRow]()
        for _ in range(steps):
            if self._ahead is not None and not (self._ahead_goes_on and self._may_stay(positions)):
                changed += self._settle()
            if not len(self):
                break
            if self._ahead is not None and isinstance(self._store, Slots):
                # A row that ends with the step in flight may have filled its slot: the next step must not write there.
                self._store.leave(place for row, place in self._ahead.places.items() if not row.may_go_on)
            launched, before = self._launch(positions, max_rows), self._ahead
            self._ahead = launched
            if before is not None:
                changed += self._take(before, later_steps=1)
            if launched.newest is None or not isinstance(self._store, Slots):
                changed += self._settle()
        return changed if self._ahead_goes_on else [*changed, *self._settle()]

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    @property
    def _ahead_goes_on(self) -> bool:
        return self._ahead is not None and any(row.may_go_on for row in self._ahead.places)

    def _settle(self) -> list[BatchRow]:
        """Give the rows the tokens of a step that was launched earlier, if there is one; return these rows."""
        ahead, self._ahead = self._ahead, None
        return [] if ahead is None else self._take(ahead)

    def _launch(self, positions: int, max_rows: int) -> _Launched:
        """Launch one decode step of all rows; on a device, do not wait for its tokens."""
        if self._store is None:
            if positions and self._captured is not None:
                self._captured.reason = "the model has no cache"
            rows = [*self]
            return _Launched({row: place for place, row in enumerate(rows)}, whole_logits(self._model, rows), None)
        store = self._ready(self._store, positions, max_rows)
        newest = self._newest
        if newest is None:
            ids = [[0 if row is None else row.newest] for row in self._places]
            newest = torch.tensor(ids, device=self._model.device)
        logits = store.step(newest).logits[:, -1]
        if isinstance(store, Slots) and self._captured is not None:
            self._captured.reason = self._captured.reason or store.steps.reason
        places = {row: place for place, row in enumerate(self._places) if row is not None}
        best = self._choice.best([*places], logits)
        self._newest = None if best is None else best.on_device
        return _Launched(places, logits, best)

    def _take(self, launched: _Launched, later_steps: int = 0) -> list[BatchRow]:
        """Give the rows of a step their tokens, and return these rows; rows that end leave the batch. `later_steps` is
        the number of steps that were launched after this one."""
        # Skip rows that ended in the step before, or that have left since.
        staying = {*self}
        places = {row: place for row, place in launched.places.items() if row in staying}
        if launched.newest is None:
            self._newest = self._choice.choose([*places], launched.logits, [*places.values()])
        elif places:
            launched.newest.give([*places], [*places.values()])
        for row, place in places.items():
            # Keep the sequence of an ended row, because a later prompt may begin with it.
            if row.outcome == ENDED and row.may_be_kept and self._store is not None:
                cache = self._store.lend(later_steps) if isinstance(self._store, Slots) else self._store.cache
                self._prefixes.keep(row.ids[:, :-1], cache, place)
        self.leave({row.number for row in places if row.outcome != GOES_ON})
        return [*places]

    def leave(self, numbers: Collection[int]) -> None:
        places = [index for index, row in enumerate(self._places) if row is not None and row.number in numbers]
        for index in places:
            self._places[index] = None
        if not any(self._places):
            self._places, self._store, self._ahead, self.token_bytes = [], None, None, 0
        elif self._store is not None and places:
            self._store.leave(places)

    def _ready(self, store: GrowingRows | Slots, positions: int, max_rows: int) -> GrowingRows | Slots:
        if isinstance(store, Slots):
            if self._may_stay(positions):
                return store
            store = self._pack(store)
        count, columns = store.mask.shape
        empty_columns = columns - max(row.columns for row in self)
        if (count - len(self)) * _MAX_EMPTY >= count or empty_columns * _MAX_EMPTY >= columns:
            store = self._pack(store)
        slots = None
        if positions and self._captured is not None:
            slots = self._captured.moved(store, positions, max_rows)
        if slots is not None:
            self._store = slots
            self._fill_bucket()
        return slots or store

    def _may_stay(self, positions: int) -> bool:
        """Whether the batch's rows can keep their batch slots for another step."""
        is_wide = bucket_of(len(self)) * _MAX_EMPTY <= len(self._places)
        return isinstance(self._store, Slots) and positions > 0 and self._store.has_room and not is_wide

    def _fill_bucket(self) -> None:
        """Add free slots up to a power of two, because CUDA graphs are recorded for powers of two of rows."""
        count = len(self._places)
        self._places += [None] * (bucket_of(count) - count)
        self._newest = None

    def _pack(self, store: GrowingRows | Slots) -> GrowingRows:
        """Drop empty slots and columns, and move the rows to a growing cache."""
        full = [index for index, row in enumerate(self._places) if row is not None]
        columns = max(row.columns for row in self)
        if isinstance(store, Slots):
            store = self._store = store.packed(full, columns)
        else:
            store.keep(full, columns)
        self._places, self._newest = [*self], None
        return store
