"""Adds rows to a transformers cache, and removes rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from parallelformers_ng.cuda_graphs.static_caches import EMPTY
from parallelformers_ng.errors import BatchingError
from parallelformers_ng.generation.in_place_cache import free_rows, keep_paged_rows, spread
from parallelformers_ng.sharding.cache_names import CACHES

_NAMES = (*CACHES, "state")
_ALIGNED = {"keys": (0, -2), "values": (0, -2), "indexer_keys": (0, -2), "indexer_position_ids": (1, -1)}
"""Name of a cache layer's tensor → its dimension of rows, and its dimension of columns (token positions)."""


@dataclass
class _CacheTensor:
    """A tensor of a cache, and the container that holds the tensor."""

    place: Any  # container of the tensor: attributes of a layer, or a list or dictionary of states
    key: Any  # key or index of the tensor in `place`
    # Dimensions of rows and columns; None for a state of a convolution or of linear attention, which has no columns.
    aligned: tuple[int, int] | None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, transposed to `[rows, columns, …]`; a state of linear attention has no columns: `[rows, …]`."""
        content: torch.Tensor = self.place[self.key]
        return content if self.aligned is None else content.movedim(self.aligned, (0, 1))

    @tensor.setter
    def tensor(self, value: torch.Tensor) -> None:
        self.place[self.key] = value if self.aligned is None else value.movedim((0, 1), self.aligned)


def name_in(arguments: Mapping[str, Any]) -> str:
    """Return the name of the cache among a model's arguments or outputs; "" without a cache."""
    return next((name for name in _NAMES if arguments.get(name) is not None), "")


def is_of_tokens_alone(cache: Any) -> bool:
    """Return whether a cache is made for keys and values only, not for states of convolutions or linear attention."""
    items = (item for holder in _holders(cache) for item in holder.items())
    return not any(isinstance(value, (list, dict)) and name != "layers" for name, value in items)


def holds_any(cache: Any) -> bool:
    return next(iter(_cache_tensors(cache)), None) is not None


def keeps_all(cache: Any) -> bool:
    """Return whether a cache keeps keys and values of all tokens, and no states of convolutions or linear attention."""
    return is_of_tokens_alone(cache) and all(type(layer) is DynamicLayer for layer in layers_of(cache))


def keeps_windows(cache: Any) -> bool:
    """Return whether a cache keeps keys and values of all tokens or of a sliding window, and no other states.

    Layers that read the keys and values of other layers may keep nothing.
    """
    kinds = (DynamicLayer, DynamicSlidingWindowLayer)
    return is_of_tokens_alone(cache) and all(type(layer) in kinds for layer in layers_with_keys(cache))


def keep_rows(cache: Any, rows: list[int], columns: int) -> None:
    """Keep only the given rows of a cache, in ascending order, and their last `columns` columns (token positions)."""
    paged = [layer for layer in layers_of(cache) if keep_paged_rows(layer, rows, columns)]
    for item in _cache_tensors(cache, paged):
        kept = item.tensor[rows]
        item.tensor = kept if item.aligned is None else kept[:, max(0, kept.shape[1] - columns) :]
    note_columns(cache, columns)


def put_rows(cache: Any, others: Any, rows: list[int], count: int, columns: int) -> None:
    """Copy all rows of the cache `others` to the given rows of `cache`, which grows to at least `count` rows. The last
    tokens of all rows get into the same column. `columns` is the length of the longer cache."""
    for layer in layers_of(cache):
        if type(layer) is DynamicLayer and layer.is_initialized and layer.keys.ndim == 4:
            spread(layer, max(count, len(layer.keys)), columns)
    paged = [vars(layer) for layer in layers_of(cache) if free_rows(layer, rows)]
    for ours, theirs in zip(_cache_tensors(cache), _cache_tensors(others), strict=True):
        old, new = ours.tensor, theirs.tensor
        is_empty = any(ours.place is each for each in paged)
        wider = 0 if ours.aligned is None else max(0, new.shape[1] - old.shape[1])
        if wider or count > len(old):
            inner = [0, 0] * (old.ndim - 1) if ours.aligned is None else [*[0, 0] * (old.ndim - 2), wider, 0]
            old = ours.tensor = pad(old, [*inner, 0, count - len(old)])
        for row, states in zip(rows, new, strict=True):  # three times as fast as one assignment to a list of rows
            if ours.aligned is None:
                old[row] = states
            else:
                if not is_empty:
                    old[row, : old.shape[1] - new.shape[1]] = 0
                old[row, old.shape[1] - new.shape[1] :] = states
    note_columns(cache, columns)


def empty_rows(cache: Any, rows: Collection[int]) -> bool:
    """Free the memory of rows, whose keys and values become zeros. Return whether all layers could do that."""
    freed = [free_rows(layer, [*rows]) for layer in layers_of(cache)]
    return bool(freed) and all(freed)


def align_ends(cache: Any, empty: list[int]) -> None:
    """Move padding, the last `empty[row]` columns of each row, to the row's beginning. No states are in the cache."""
    for item in _cache_tensors(cache) if any(empty) else ():
        item.tensor = torch.stack([row.roll(columns, 0) for row, columns in zip(item.tensor, empty, strict=True)])


def token_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values of one token of one row, in all layers of this rank's cache."""
    tensors = [each.tensor for each in _cache_tensors(cache) if each.aligned]
    return sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in tensors)


def layers_of(cache: Any) -> list[Any]:
    """Return the layers of a cache; an empty list if the cache has states of linear attention, and no layers."""
    layers = getattr(cache, "layers", ())
    return [part for layer in layers for part in getattr(layer, "parts", (layer,))]  # an int8 layer has two parts


def layers_with_keys(cache: Any) -> list[Any]:
    return [layer for layer in layers_of(cache) if type(layer).__name__ != EMPTY]


def note_columns(cache: Any, columns: int) -> None:
    """Set the number of tokens that layers with a sliding window have counted."""
    for layer in layers_of(cache):
        if hasattr(layer, "cumulative_length"):  # counts all tokens, also those outside the sliding window
            layer.cumulative_length = columns


def _cache_tensors(cache: Any, without: Sequence[Any] = ()) -> Iterator[_CacheTensor]:
    """Yield every tensor of a cache that has rows, except those of some layers; raise BatchingError if rows cannot be
    added to a tensor."""
    skipped = {id(vars(layer)) for layer in without}
    for holder in _holders(cache):
        if id(holder) in skipped:
            continue
        for name, value in holder.items():
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                if name not in _ALIGNED:
                    raise BatchingError(f"rows cannot be added to the tensor {name} of a {type(cache).__name__}")
                yield _CacheTensor(holder, name, _ALIGNED[name])
            elif isinstance(value, (list, dict)) and name != "layers":
                yield from _states(value)


def _holders(cache: Any) -> list[dict[str, Any]]:
    """Return the attributes of a cache and of its layers, as dictionaries. Some models' cache is a plain list."""
    own = {"": cache} if isinstance(cache, list) else vars(cache)
    return [own, *(vars(layer) for layer in layers_of(cache))]


def _states(place: Any) -> Iterator[_CacheTensor]:
    """Yield the state tensors in nested lists and dictionaries; make tuples lists, so that states can be replaced."""
    for key in range(len(place)) if isinstance(place, list) else place:
        if isinstance(place[key], tuple):
            place[key] = list(place[key])
        if isinstance(place[key], list):
            yield from _states(place[key])
        elif isinstance(place[key], torch.Tensor) and place[key].ndim > 1:
            yield _CacheTensor(place, key, None)
