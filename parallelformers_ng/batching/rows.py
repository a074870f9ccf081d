"""Decodes the rows of a batch together on a rank. Every rank has the same rows and the same tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching import row_caches
from parallelformers_ng.batching.growing_rows import GrowingRows
from parallelformers_ng.batching.penalties import penalized
from parallelformers_ng.batching.prefixes import Prefixes
from parallelformers_ng.batching.prompts import Ran, rows_of
from parallelformers_ng.batching.row import ENDED, FAILED, GOES_ON, BatchRow
from parallelformers_ng.batching.slots import CapturedRows, Slots
from parallelformers_ng.batching.whole_rows import whole_logits
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.cuda_graphs.static_caches import bucket_of

_MOST_EMPTY = 4
"""If one in 4 rows or columns is empty, the batch drops the empty rows and columns, which copies all caches."""


@dataclass
class _Launched:
    """A step whose tokens the rows do not have yet.

    Attributes:
        places: row of the step → index in `logits`.
        logits: logits, `[places, vocabulary]`.
        newest: chosen tokens on the device, int64 `[places, 1]`; None if the rows are not all greedy on a device.
    """

    places: dict[BatchRow, int]
    logits: torch.Tensor
    newest: torch.Tensor | None


class Rows:
    """The sequences of one batch.

    A row joins with the cache of its prompt. Each row has its own mask and positions, so the tokens of a row do not
    depend on other rows. `batch_proof.py` checks this for each model. Every rank chooses the next tokens of a share of
    the rows.

    Args:
        model: model of the rank.
        communicator: connection to the other ranks; None for one rank.
        prefixes: store that keeps complete sequences.
        captured: maker of slots, whose steps are recorded; None for no recordings.

    Attributes:
        token_bytes: bytes of the keys and values of one token; 0 without a row.
    """

    def __init__(
        self,
        model: Any,
        communicator: Communicator | None,
        prefixes: Prefixes,
        captured: CapturedRows | None = None,
    ) -> None:
        self.token_bytes = 0
        self._model = model
        self._communicator = communicator
        self._prefixes = prefixes
        self._captured = captured
        self._places: list[BatchRow | None] = []
        self._store: GrowingRows | Slots | None = None  # keys and values of the rows in `_places`
        self._newest: torch.Tensor | None = None  # newest tokens, int64 `[places, 1]`, if they are on the device

    def __len__(self) -> int:
        return sum(row is not None for row in self._places)

    def __iter__(self) -> Iterator[BatchRow]:
        return (row for row in self._places if row is not None)

    def join(self, results: list[Ran]) -> None:
        """Add the rows of prompts that ran, keep the prompts for later prompts, and choose the first new tokens.

        Raises:
            BatchingError: rows cannot be added to a cache of this model.
            CollectiveAbortedError, DivergedError: see `Communicator.all_gather`.
        """
        rows = rows_of(results)
        for ran in results:
            for index, row in enumerate(ran.rows):
                if row.may_be_kept and ran.cache is not None:
                    # The first cache becomes the cache of the batch, which grows. Any other cache is not used again;
                    # one row's part of it would keep the memory of all its rows.
                    grows = ran is results[0] and self._store is None
                    self._prefixes.keep(row.ids, ran.cache, index, copies=grows or len(ran.rows) > 1)
        self._choose(rows, torch.cat([ran.logits for ran in results]), [*range(len(rows))])
        for ran in results:
            self._place(ran)
        self._newest = None
        self.leave([row.number for row in rows if row.outcome != GOES_ON])

    def _place(self, ran: Ran) -> None:
        if ran.cache is None:
            self._places = [*self, *ran.rows]
        elif self._store is None:
            name = row_caches.name_in(ran.rows[0].call.model_kwargs)
            self._places, self._store = [*ran.rows], GrowingRows(self._model, name, ran.cache, ran.mask)
            self.token_bytes = row_caches.token_bytes(ran.cache)
        else:
            self._put(self._store, ran)
        for row in ran.rows:
            row.forget_cache()

    def _put(self, store: GrowingRows | Slots, ran: Ran) -> None:
        """Put new rows into empty places, and then after the last place."""
        if isinstance(store, Slots) and not store.may_put(ran.mask.shape[1], len(self) + len(ran.rows)):
            store = self._pack(store)
        before = len(self._places)
        free = [index for index, row in enumerate(self._places) if row is None]
        free = [*free, *range(before, before + len(ran.rows))][: len(ran.rows)]
        self._places += [None] * (free[-1] + 1 - before)
        for index, row in zip(free, ran.rows, strict=True):
            self._places[index] = row
        if isinstance(store, Slots):
            store.put(ran.cache, ran.mask, free)
            self._fill_bucket()
        else:
            store.put(ran.cache, ran.mask, free, len(self._places))

    def run(self, steps: int, positions: int = 0, most_rows: int = 1) -> list[BatchRow]:
        """Choose up to `steps` more tokens for each row; fewer if no row is left.

        On a device, a recorded step of greedy rows is launched before the host reads the tokens of the step before, so
        that the device does not wait for Python. A row that ends meanwhile ignores the token of the later step.

        Args:
            steps: number of steps.
            positions: most rows × tokens of a cache whose steps are recorded; 0 for no recordings.
            most_rows: most rows of the batch.

        Returns:
            The rows, including rows that ended and have left.

        Raises:
            BatchingError: an argument of a model without a cache cannot be padded.
        """
        changed, ahead = list[BatchRow](), None
        for _ in range(steps):
            if ahead is not None and not (any(row.may_go_on for row in ahead.places) and self._may_stay(positions)):
                self._take(ahead)
                ahead = None
            if not len(self):
                break
            launched = self._launch(positions, most_rows)
            changed += launched.places
            if ahead is not None:
                self._take(ahead, later_steps=1)
            ahead = launched if launched.newest is not None and isinstance(self._store, Slots) else None
            if ahead is None:
                self._take(launched)
        if ahead is not None:
            self._take(ahead)
        return changed

    def _launch(self, positions: int, most_rows: int) -> _Launched:
        """Run the model for one more token of each row, on a device without waiting for it. The arguments are those of
        `run`."""
        if self._store is None:
            if positions and self._captured is not None:
                self._captured.reason = "the model has no cache"
            rows = [*self]
            return _Launched({row: place for place, row in enumerate(rows)}, whole_logits(self._model, rows), None)
        store = self._ready(self._store, positions, most_rows)
        newest = self._newest
        if newest is None:
            ids = [[0 if row is None else row.newest] for row in self._places]
            newest = torch.tensor(ids, device=self._model.device)
        logits = store.step(newest).logits[:, -1]
        if isinstance(store, Slots) and self._captured is not None:
            self._captured.reason = self._captured.reason or store.steps.reason
        places = {row: place for place, row in enumerate(self._places) if row is not None}
        self._newest = self._best([*places], logits)
        return _Launched(places, logits, self._newest)

    def _take(self, launched: _Launched, later_steps: int = 0) -> None:
        """Give the rows of a step their tokens; rows that end leave.

        Args:
            launched: the step.
            later_steps: number of steps that were launched after it.
        """
        # Other rows ended in the step before.
        places = {row: place for row, place in launched.places.items() if row.outcome == GOES_ON}
        if launched.newest is None:
            self._newest = self._choose([*places], launched.logits, [*places.values()])
        else:
            self._read([*places], [*places.values()], launched.newest)
        for row, place in places.items():
            if row.outcome == ENDED and row.may_be_kept and self._store is not None:  # a later prompt may begin so
                cache = self._store.lend(later_steps) if isinstance(self._store, Slots) else self._store.cache
                self._prefixes.keep(row.ids[:, :-1], cache, place)
        self.leave({row.number for row in places if row.outcome != GOES_ON})

    def leave(self, numbers: Collection[int]) -> None:
        """Remove the rows with the given numbers; without a row, drop the cache."""
        places = [index for index, row in enumerate(self._places) if row is not None and row.number in numbers]
        for index in places:
            self._places[index] = None
        if not any(self._places):
            self._places, self._store, self.token_bytes = [], None, 0
        elif isinstance(self._store, Slots):
            self._store.leave(places)

    def _ready(self, store: GrowingRows | Slots, positions: int, most_rows: int) -> GrowingRows | Slots:
        """Return the store for the next step: slots if the step may be recorded."""
        if isinstance(store, Slots):
            if self._may_stay(positions):
                return store
            store = self._pack(store)
        count, columns = store.mask.shape
        empty_columns = columns - max(row.columns for row in self)
        if (count - len(self)) * _MOST_EMPTY >= count or empty_columns * _MOST_EMPTY >= columns:
            store = self._pack(store)
        slots = None
        if positions and self._captured is not None:
            slots = self._captured.moved(store, positions, most_rows)
        if slots is not None:
            self._store = slots
            self._fill_bucket()
        return slots or store

    def _may_stay(self, positions: int) -> bool:
        """Return whether the rows may stay in their slots for another step; `positions` as in `run`."""
        is_wide = bucket_of(len(self)) * _MOST_EMPTY <= len(self._places)
        return isinstance(self._store, Slots) and positions > 0 and self._store.has_room and not is_wide

    def _fill_bucket(self) -> None:
        """Add free places up to a power of two, because recorded steps have powers of two as numbers of rows."""
        count = len(self._places)
        self._places += [None] * (bucket_of(count) - count)
        self._newest = None

    def _pack(self, store: GrowingRows | Slots) -> GrowingRows:
        """Drop empty places and columns. The rows are in a growing cache afterwards."""
        full = [index for index, row in enumerate(self._places) if row is not None]
        columns = max(row.columns for row in self)
        if isinstance(store, Slots):
            store = self._store = store.packed(full, columns)
        else:
            store.keep(full, columns)
        self._places, self._newest = [*self], None
        return store

    def _choose(self, rows: list[BatchRow], logits: torch.Tensor, places: list[int]) -> torch.Tensor | None:
        """Choose the next token of each row.

        On the CPU, each rank chooses for a share of the rows, and all ranks gather the tokens. On a device, rank 0
        chooses for all greedy rows at once, and the host waits once.

        Args:
            rows: the rows.
            logits: logits, `[places, vocabulary]`.
            places: index in `logits` for each row.

        Returns:
            Newest token of each place, int64 `[places, 1]` on the device; None if the host has the tokens only.
        """
        if (newest := self._best(rows, logits)) is not None:
            self._read(rows, places, newest)
            return newest
        on_device = logits.device.type != "cpu"
        ranks = 1 if self._communicator is None else self._communicator.world_size
        chosen = self._chosen_here(rows, logits, places)
        if self._communicator is not None:
            chosen = self._communicator.all_gather(chosen, 0)
        newest_ids = [chosen[0, 0, :1]] * len(logits)  # any id for a free place
        for index, (row, outcomes) in enumerate(zip(rows, chosen.transpose(0, 1).tolist(), strict=True)):
            owner = row.number % ranks
            token, outcome = outcomes[owner]
            newest_ids[places[index]] = chosen[owner, index, :1]
            if row.greedy is not None:
                row.take(token, row.after(token))
            else:
                row.take(token, outcome, newest_ids[places[index]][None] if on_device else None)
        return torch.stack(newest_ids) if on_device else None

    def _best(self, rows: list[BatchRow], logits: torch.Tensor) -> torch.Tensor | None:
        """Return the tokens with the largest logits, as rank 0 has them, int64 `[places, 1]`; None on the CPU, or if
        not all rows are greedy."""
        if logits.device.type == "cpu" or any(row.greedy is None for row in rows):
            return None
        newest = logits.max(-1, keepdim=True).indices
        return newest if self._communicator is None else self._communicator.all_gather(newest[None], 0)[0]

    def _read(self, rows: list[BatchRow], places: list[int], newest: torch.Tensor) -> None:
        """Wait for the tokens of `_best`, and give them to the rows at the given places."""
        tokens = newest.flatten().tolist()
        for row, place in zip(rows, places, strict=True):
            row.take(tokens[place], row.after(tokens[place]))

    def _chosen_here(self, rows: list[BatchRow], logits: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Choose the next tokens of this rank's share of the rows.

        Returns:
            Token and outcome of each row, int64 `[1, rows, 2]`; any numbers for the rows of other ranks. The outcome of
            a greedy row is GOES_ON.
        """
        rank, ranks = (0, 1) if self._communicator is None else (self._communicator.rank, self._communicator.world_size)
        own = [index for index, row in enumerate(rows) if row.number % ranks == rank]
        scores = {index: logits[places[index], None] for index in own if rows[index].greedy is None}
        if penalized_rows := [index for index in scores if rows[index].call.penalties is not None]:
            penalties = [each for index in penalized_rows if (each := rows[index].call.penalties) is not None]
            sequences = [rows[index].ids[0] for index in penalized_rows]
            changed = penalized(_of(logits, [places[index] for index in penalized_rows]).float(), sequences, penalties)
            scores.update(zip(penalized_rows, changed.split(1), strict=True))
        chosen = {index: rows[index].choose(each) for index, each in scores.items()}
        if logits.device.type != "cpu":
            best = pad(logits.max(-1, keepdim=True).indices, (0, 1), value=GOES_ON)
            choices = [best[place] for place in places]
            for index, choice in chosen.items():  # False is GOES_ON, True is ENDED
                choices[index] = (
                    torch.full_like(best[0], FAILED) if choice is None else torch.cat((choice[0][0], choice[1].long()))
                )
            return torch.stack(choices)[None]
        mine = [(0, FAILED)] * len(rows)
        if greedy := [index for index in own if rows[index].greedy is not None]:
            best = _of(logits, [places[index] for index in greedy]).max(-1).indices
            for index, token in zip(greedy, best.tolist(), strict=True):
                mine[index] = token, GOES_ON
        for index, choice in chosen.items():
            if choice is not None:
                mine[index] = int(choice[0]), ENDED if choice[1] else GOES_ON
        return torch.tensor([mine])


def _of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Return the rows of `logits` with the given indices, without a copy if the indices have one stride."""
    stride = rows[1] - rows[0] if len(rows) > 1 else 1
    is_range = rows == list(range(rows[0], rows[0] + stride * len(rows), stride))
    return logits[rows[0] : rows[-1] + 1 : stride] if is_range else logits[rows]
