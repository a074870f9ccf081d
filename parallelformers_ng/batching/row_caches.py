"""Adds rows to a cache of transformers, and takes rows away."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from parallelformers_ng.errors import BatchingError
from parallelformers_ng.sharding.cache_names import CACHES

_NAMES = (*CACHES, "state")
_ALIGNED = {"keys": (0, -2), "values": (0, -2), "indexer_keys": (0, -2), "indexer_position_ids": (1, -1)}
"""Tensors of a layer, and the dimensions that are rows and columns."""


@dataclass
class _Held:
    """A tensor of a cache, and the place that holds it.

    Attributes:
        place: attributes of a layer, or a list or dictionary of states.
        key: place in that object.
        aligned: dimensions of rows and columns; None without columns: a state, `[rows, …]`, of convolutions or
            linear attention.
    """

    place: Any
    key: Any
    aligned: tuple[int, int] | None

    @property
    def tensor(self) -> torch.Tensor:
        """`[rows, columns, …]`, or a state."""
        content: torch.Tensor = self.place[self.key]
        return content if self.aligned is None else content.movedim(self.aligned, (0, 1))

    @tensor.setter
    def tensor(self, value: torch.Tensor) -> None:
        self.place[self.key] = value if self.aligned is None else value.movedim((0, 1), self.aligned)


def name_in(arguments: Mapping[str, Any]) -> str:
    """Return the name of the cache among a model's arguments or outputs; "" if there is none."""
    return next((name for name in _NAMES if arguments.get(name) is not None), "")


def is_of_tokens_alone(cache: Any) -> bool:
    """Return whether a cache, maybe still empty, will hold keys and values and no states."""
    items = (item for holder in _holders(cache) for item in holder.items())
    return not any(isinstance(value, (list, dict)) and name != "layers" for name, value in items)


def holds_any(cache: Any) -> bool:
    """Return whether a cache holds anything."""
    return next(iter(_all_held(cache)), None) is not None


def keeps_all(cache: Any) -> bool:
    """Return whether a cache keeps the keys and values of all tokens, and nothing else."""
    return is_of_tokens_alone(cache) and all(type(layer) is DynamicLayer for layer in layers_of(cache))


def keep_rows(cache: Any, rows: list[int], columns: int) -> None:
    """Keep some rows alone, and no more than the last columns."""
    for item in _all_held(cache):
        kept = item.tensor[rows]
        item.tensor = kept if item.aligned is None else kept[:, max(0, kept.shape[1] - columns) :]
    _note_columns(cache, columns)


def put_rows(cache: Any, others: Any, rows: list[int], count: int, columns: int) -> None:
    """Put the rows of another cache into one.

    Args:
        cache: has `count` rows afterwards, or had them.
        others: its rows are aligned with those of `cache` at their ends.
        rows: rows for them.
        columns: columns of the longer cache.
    """
    for ours, its in zip(_all_held(cache), _all_held(others), strict=True):
        old, new = ours.tensor, its.tensor
        wider = 0 if ours.aligned is None else max(0, new.shape[1] - old.shape[1])
        if wider or count > len(old):
            inner = [0, 0] * (old.ndim - 1) if ours.aligned is None else [*[0, 0] * (old.ndim - 2), wider, 0]
            old = pad(old, [*inner, 0, count - len(old)])
        if ours.aligned is None:
            old[rows] = new
        else:
            old[rows, old.shape[1] - new.shape[1] :] = new
        ours.tensor = old
    _note_columns(cache, columns)


def align_ends(cache: Any, empty: list[int]) -> None:
    """Move the empty columns of each row, which come last, before the others."""
    for item in _all_held(cache):
        item.tensor = torch.stack([row.roll(columns, 0) for row, columns in zip(item.tensor, empty, strict=True)])


def token_bytes(cache: Any) -> int:
    """Return bytes of what one token of one row takes."""
    tensors = [each.tensor for each in _all_held(cache) if each.aligned]
    return sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in tensors)


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache; none of one that holds states alone."""
    layers = getattr(cache, "layers", ())
    return [part for layer in layers for part in getattr(layer, "parts", (layer,))]  # one in int8 is made of two


def _note_columns(cache: Any, columns: int) -> None:
    for layer in layers_of(cache):
        if hasattr(layer, "cumulative_length"):  # of a window that slides: of all columns, also those it left
            layer.cumulative_length = columns


def _all_held(cache: Any) -> Iterator[_Held]:
    """Yield every tensor that has rows.

    Raises:
        BatchingError: the cache has a part to which rows cannot be added.
    """
    for holder in _holders(cache):
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                if name not in _ALIGNED:
                    raise BatchingError(f"it is not known how to add a row to {name} of a {type(cache).__name__}")
                yield _Held(holder, name, _ALIGNED[name])
            elif isinstance(value, (list, dict)) and name != "layers":
                yield from _states(value)


def _holders(cache: Any) -> list[dict[str, Any]]:
    """Return the attributes of a cache (some models have a mere list) and of its layers."""
    own = {"": cache} if isinstance(cache, list) else vars(cache)
    return [own, *(vars(layer) for layer in layers_of(cache))]


def _states(place: Any) -> Iterator[_Held]:
    for key in range(len(place)) if isinstance(place, list) else place:
        if isinstance(place[key], tuple):
            place[key] = list(place[key])
        if isinstance(place[key], list):
            yield from _states(place[key])
        elif isinstance(place[key], torch.Tensor) and place[key].ndim > 1:
            yield _Held(place, key, None)
