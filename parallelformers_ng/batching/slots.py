"""Keeps the rows of a batch in slots of a static cache, whose decode steps are CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from parallelformers_ng.batching.growing_rows import GrowingRows
from parallelformers_ng.batching.prepared import inputs_of
from parallelformers_ng.batching.row_caches import keeps_windows, layers_with_keys, note_columns
from parallelformers_ng.cuda_graphs.captured import CapturedSteps
from parallelformers_ng.cuda_graphs.modes import MAX_POSITIONS
from parallelformers_ng.cuda_graphs.static_caches import LENGTH_STEP, ReusableCache, bucket_of, cache_without_windows

_SPARE = 4
"""A new static cache has room for a quarter more columns than its rows have. Then few steps copy the cache."""


class Slots:
    """The keys and values of a batch's rows, aligned at their newest token, in slots of a static cache.

    ::

        a joins b:   · · a a a ·      a step:   · · a a a a      c comes in a's slot:   · · · c c c
                     b b b b b ·                b b b b b b                             b b b b b b

    A new row writes the keys and values of its own prompt, and copies no other row. A step writes to the next column of
    all slots. In a free slot, only the newest column is visible.

    A layer with a sliding window also keeps all columns, and the mask hides those before the window. transformers'
    static layer would copy the whole window in each step, and the Triton kernels do not know it. The limit of a batch's
    tokens counts these columns (`Rows.token_bytes`).

    Attributes:
        columns: number of columns with tokens.
    """

    def __init__(
        self, model: PreTrainedModel, steps: CapturedSteps, static: ReusableCache, growing: GrowingRows, slots: int
    ) -> None:
        rows, self.columns = growing.mask.shape
        self._model, self.steps, self._static, self._growing = model, steps, static, growing
        static.fill(layers_with_keys(growing.cache), slots, self.columns)
        self._memory = [layer.whole for layer in static.layers]
        self.lend()  # frees the memory of the growing cache
        self._mask = growing.mask.new_zeros((slots, static.length), dtype=torch.long)
        self._mask[:rows, : self.columns] = growing.mask
        # What a step writes to the mask's last two columns: whether a slot has a row; and 1, because a row without a
        # visible column has no defined attention.
        self._pattern = torch.ones_like(self._mask[:, :2])
        self._pattern[rows:, 0] = 0
        self._width = slots

    def lend(self, later_steps: int = 0) -> Any:
        """A growing cache whose keys and values are views of the slots, until the next step, without the columns of the
        last `later_steps`."""
        cache, columns = self._growing.cache, self.columns - later_steps
        for layer, (keys, values) in zip(layers_with_keys(cache), self._memory, strict=True):
            layer.keys, layer.values = keys[:, :, :columns], values[:, :, :columns]
        return cache

    @property
    def has_room(self) -> bool:
        """Whether a step has a column to write to. Deleted recordings have no cache any more."""
        return self.columns < self._static.length and self._static.layers[0].whole is self._memory[0]

    def may_put(self, columns: int, count: int) -> bool:
        """Whether `put` can add rows without a copy of other rows, so that `count` slots are in use."""
        return self.has_room and columns <= self.columns and count <= len(self._mask)

    def put(self, cache: Any, mask: torch.Tensor, places: list[int]) -> None:
        """Add rows in free slots."""
        index = torch.tensor(places, device=mask.device)
        for memory, layer in zip(self._memory, layers_with_keys(cache), strict=True):
            for slots, states in zip(memory, (layer.keys, layer.values), strict=True):
                slots.index_fill_(0, index, 0)  # an earlier row may have left infinities
                slots[:, :, self.columns - states.shape[2] : self.columns].index_copy_(0, index, states)
        self._mask.index_fill_(0, index, 0)
        self._mask[:, self.columns - mask.shape[1] : self.columns].index_copy_(0, index, mask.to(self._mask.dtype))
        self._pattern[:, 0].index_fill_(0, index, 1)

    def leave(self, places: Iterable[int]) -> None:
        for place in places:
            self._mask[place].zero_()
            self._pattern[place, 0].zero_()

    def step(self, newest: torch.Tensor) -> Any:
        """Run the model for one more token of each row, from a recording if possible.

        `newest` has the newest token of each of the first slots, int64 `[rows, 1]`, and any id for a free slot. The
        number of rows is a power of two.
        """
        width = len(newest)
        if width != self._width:
            self._width = width
            for layer in self._static.layers:
                layer.narrow(width)
        self._mask[:, self.columns - 1 : self.columns + 1] = self._pattern
        self.columns += 1
        mask, cache = self._mask[:width], self._static.cache
        arguments = {"attention_mask": mask, "use_cache": True, self._growing.name: cache}
        inputs = inputs_of(self._model, newest, mask.sum(-1, keepdim=True) - 1, **arguments)
        return self.steps.run(self._model, self._static, {**inputs, "return_dict": True})

    def packed(self, places: list[int], columns: int) -> GrowingRows:
        """Copy rows to a growing cache, which replaces this object."""
        index = torch.tensor(places, device=self._mask.device)
        kept = slice(self.columns - columns, self.columns)
        for layer, memory in zip(layers_with_keys(self._growing.cache), self._memory, strict=True):
            window = getattr(layer, "sliding_window", columns + 1)
            first = self.columns - min(columns, window - 1)  # the step after it adds the last token of a window
            layer.keys, layer.values = (states[:, :, first : self.columns].index_select(0, index) for states in memory)
        note_columns(self._growing.cache, columns)
        self._growing.mask = self._mask[:, kept].index_select(0, index)
        return self._growing


class CapturedRows:
    """The maker of slots for one rank's batches.

    Attributes:
        reason: why a step ran without a recording; "" if every step had a recording.
    """

    def __init__(self, model: PreTrainedModel, steps: Callable[[], CapturedSteps | str]) -> None:
        self.reason = ""
        self._model = model
        self._steps = steps

    def moved(self, growing: GrowingRows, positions: int, max_rows: int) -> Slots | None:
        """Move rows to slots of a static cache, if a step of at most `positions` can be recorded; None if `growing`
        keeps them.

        There are slots for `max_rows`, unless that many slots have more than `MAX_POSITIONS` positions.
        """
        rows, columns = growing.mask.shape
        needed = columns + columns // _SPARE + 1
        length = max(LENGTH_STEP, bucket_of(needed))  # up to half is unused, but one recording serves many lengths
        if bucket_of(rows) * length > positions:
            return None
        steps = self._steps()
        if isinstance(steps, str):
            self.reason = steps
            return None
        if not keeps_windows(growing.cache):
            self.reason = f"rows of this model's {type(growing.cache).__name__} cannot be copied to a static cache"
            return None
        slots = max(bucket_of(rows), min(bucket_of(max_rows), MAX_POSITIONS // length))
        if held := steps.rows_held(slots, needed):
            slots = held
        else:
            steps.forget()  # batches keep one cache; earlier caches would take the memory of rows
        static = steps.cache(slots, needed, length, lambda: cache_without_windows(self._model.config, length))
        if static is None:
            self.reason = steps.reason
            return None
        return Slots(self._model, steps, static, growing, slots)
