"""Keeps the keys and values of a batch's rows in a cache that grows by one column at each step."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from parallelformers_ng.batching import row_caches
from parallelformers_ng.batching.prepared import inputs_of


class GrowingRows:
    """The keys and values of a batch's rows, aligned at their newest token, in a growing cache of transformers.

    ::

        a joins b:   · · a a a      a step:   · · a a a a      c comes in a's place:   · · · c c c
                     b b b b b                b b b b b b                              b b b b b b

    Args:
        model: model of the rank.
        name: name of the cache among the model's arguments.
        cache: cache of the first rows; the object changes it.
        mask: mask of the cache, `[rows, columns]`: 0 for padding, 1 for tokens.
    """

    def __init__(self, model: Any, name: str, cache: Any, mask: torch.Tensor) -> None:
        self.name, self.cache, self.mask = name, cache, mask
        self._model = model

    def put(self, cache: Any, mask: torch.Tensor, places: list[int], count: int) -> None:
        """Copy the rows of another cache to the batch slots `places`, and pad the shorter cache. `count` is the new
        number of slots."""
        columns = max(self.mask.shape[1], mask.shape[1])
        self.mask = pad(self.mask, (columns - self.mask.shape[1], 0, 0, count - len(self.mask)))
        self.mask[places] = pad(mask, (columns - mask.shape[1], 0)).to(self.mask.dtype)
        row_caches.put_rows(self.cache, cache, places, count, columns)

    def step(self, newest: torch.Tensor) -> Any:
        """Run the model for one more token of each row; `newest` is int64 `[rows, 1]`."""
        self.mask = pad(self.mask, (0, 1), value=1)
        arguments = {"attention_mask": self.mask, "use_cache": True, self.name: self.cache}
        positions = self.mask.sum(-1, keepdim=True) - 1
        return self._model(**inputs_of(self._model, newest, positions, **arguments), return_dict=True)

    def leave(self, places: list[int]) -> None:
        """Free the memory of rows that have left. Their places see only the columns of later steps."""
        if row_caches.empty_rows(self.cache, places):
            self.mask[places] = 0

    def keep(self, places: list[int], columns: int) -> None:
        """Keep the last `columns` columns of the batch slots `places`, which become the first slots."""
        self.mask = self.mask[places, self.mask.shape[1] - columns :]
        row_caches.keep_rows(self.cache, places, columns)
