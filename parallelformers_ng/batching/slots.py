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
"""A new static cache has room for a quarter more columns than its rows have, so that it seldom has to be replaced."""


class Slots:
    """The keys and values of a batch's rows, aligned at their newest token, in slots of a static cache.

    ::

        a joins b:   · · a a a ·      a step:   · · a a a a      c comes in a's slot:   · · · c c c
                     b b b b b ·                b b b b b b                             b b b b b b

    A new row writes the keys and values of its own prompt, and copies no other row. A step writes to the next column of
    all slots. In a free slot, only the newest column is visible.

    A layer with a sliding window also keeps all columns, and the mask hides those before the window. transformers'
    static layer would copy the whole window in each step, and the Triton kernels do not support it. The limit of a
    batch's tokens counts these columns (`Rows.token_bytes`).

    Attributes:
        columns: number of columns (token positions) in use.
    """

    def __init__(
        self, model: PreTrainedModel, steps: CapturedSteps, static: ReusableCache, growing: GrowingRows, slots: int
    ) -> None:
        rows, self.columns = growing.mask.shape
        self._model, self.steps, self._static, self._growing = model, steps, static, growing
        static.fill(layers_with_keys(growing.cache), slots, self.columns)
        self._memory = [layer.whole for layer in static.layers]
        self.lend()  # frees the growing cache's tensors: views of the slots replace them
        self._mask = growing.mask.new_zeros((slots, static.length), dtype=torch.long)
        self._mask[:rows, : self.columns] = growing.mask
        # `step` writes this to the mask's last two columns. The first says whether the slot has a row. The second is 1
        # also in a free slot, because attention without a visible column is undefined.
        self._pattern = torch.ones_like(self._mask[:, :2])
        self._pattern[rows:, 0] = 0
        self._width = slots

    def lend(self, later_steps: int = 0) -> Any:
        """Return a growing cache whose keys and values are views of the slots, valid until the next step, and without
        the columns of the last `later_steps` steps."""
        cache, columns = self._growing.cache, self.columns - later_steps
        for layer, (keys, values) in zip(layers_with_keys(cache), self._memory, strict=True):
            layer.keys, layer.values = keys[:, :, :columns], values[:, :, :columns]
        return cache

    @property
    def has_room(self) -> bool:
        """Whether the cache has a free column for the next step. After `CapturedSteps.forget`, there is no cache."""
        return self.columns < self._static.length and self._static.layers[0].whole is self._memory[0]

    def may_put(self, columns: int, count: int) -> bool:
        """Whether `put` can add rows of `columns` tokens without moving a row, so that `count` slots are in use."""
        return self.has_room and columns <= self.columns and count <= len(self._mask)

    def put(self, cache: Any, mask: torch.Tensor, places: list[int]) -> None:
        """Copy new rows, with their mask, to the free slots `places`."""
        index = torch.tensor(places, device=mask.device)
        for memory, layer in zip(self._memory, layers_with_keys(cache), strict=True):
            for slots, states in zip(memory, (layer.keys, layer.values), strict=True):
                slots.index_fill_(0, index, 0)  # an earlier row may have left infinities, which no mask hides
                slots[:, :, self.columns - states.shape[2] : self.columns].index_copy_(0, index, states)
        self._mask.index_fill_(0, index, 0)
        self._mask[:, self.columns - mask.shape[1] : self.columns].index_copy_(0, index, mask.to(self._mask.dtype))
        self._pattern[:, 0].index_fill_(0, index, 1)

    def leave(self, places: Iterable[int]) -> None:
        for place in places:
            self._mask[place].zero_()
            self._pattern[place, 0].zero_()

    def step(self, newest: torch.Tensor) -> Any:
        """Run one decode step of all rows, by a CUDA graph if possible.

        `newest` is the newest token of each of the first slots, int64 `[slots, 1]`, with any id for a free slot. The
        number of these slots is a power of two.
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
        """Copy the last `columns` columns of the slots `places` to a growing cache, which replaces this object."""
        index = torch.tensor(places, device=self._mask.device)
        kept = slice(self.columns - columns, self.columns)
        for layer, memory in zip(layers_with_keys(self._growing.cache), self._memory, strict=True):
            window = getattr(layer, "sliding_window", columns + 1)
            first = self.columns - min(columns, window - 1)  # one less than a window: the next step adds a token
            layer.keys, layer.values = (states[:, :, first : self.columns].index_select(0, index) for states in memory)
        note_columns(self._growing.cache, columns)
        self._growing.mask = self._mask[:, kept].index_select(0, index)
        return self._growing


class CapturedRows:
    """Moves the rows of one rank's batches to slots of a static cache, so that CUDA graphs run their decode steps.

    Attributes:
        reason: why a step ran without a CUDA graph; "" if every step had one.
    """

    def __init__(self, model: PreTrainedModel, steps: Callable[[], CapturedSteps | str]) -> None:
        self.reason = ""
        self._model = model
        self._steps = steps

    def moved(self, growing: GrowingRows, positions: int, max_rows: int) -> Slots | None:
        """Move the rows to a static cache of at most `positions` tokens in all its slots together. Return None if the
        rows should stay in `growing`.

        The cache has `max_rows` slots; fewer, if so many would hold more than `MAX_POSITIONS` tokens.
        """
        rows, columns = growing.mask.shape
        needed = columns + columns // _SPARE + 1
        length = max(LENGTH_STEP, bucket_of(needed))  # up to half is unused, but one CUDA graph serves many lengths
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
        if existing_rows := steps.rows_held(slots, needed):
            slots = existing_rows
        else:
            steps.forget()  # a batch uses one cache; earlier caches would take memory that rows need
        static = steps.cache(slots, needed, length, lambda: cache_without_windows(self._model.config, length))
        if static is None:
            self.reason = steps.reason
            return None
        return Slots(self._model, steps, static, growing, slots)
