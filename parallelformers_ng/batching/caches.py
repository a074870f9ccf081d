"""What a cache of transformers holds for the rows of a batch, so that rows can be added and taken away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, DynamicLayer

from parallelformers_ng.errors import BatchingError

_ALIGNED = ("keys", "values", "indexer_keys")
"""What layers hold for each token: `[rows, …, columns, width]`."""


@dataclass
class _Held:
    """A tensor of a cache, and the place that holds it.

    Attributes:
        place: attributes of a layer, or a list or dictionary of states.
        key: where in it.
        of_tokens: it has columns; else it is a state, `[rows, …]`, as convolutions and linear attention keep them.
    """

    place: Any
    key: Any
    of_tokens: bool

    @property
    def tensor(self) -> torch.Tensor:
        return self.place[self.key]

    @tensor.setter
    def tensor(self, value: torch.Tensor) -> None:
        self.place[self.key] = value


def name_in(arguments: dict[str, Any]) -> str:
    """As what a model takes its cache, among arguments that `generate` has prepared.

    Raises:
        BatchingError: it takes none.
    """
    for name, value in arguments.items():
        if isinstance(value, Cache):
            return name
    raise BatchingError("the model keeps no cache that rows can be added to")


def is_of_tokens_alone(cache: Any) -> bool:
    """Whether a cache, which may be empty yet, is to hold keys and values and no states."""
    holders = ({**vars(cache), "layers": None}, *map(vars, layers_of(cache)))
    return not any(isinstance(value, (list, dict)) for holder in holders for value in holder.values())


def keeps_all(cache: Any) -> bool:
    """Whether a cache keeps the keys and values of all tokens, and nothing else."""
    return is_of_tokens_alone(cache) and all(type(layer) is DynamicLayer for layer in layers_of(cache))


def keep_rows(cache: Any, rows: list[int], columns: int) -> None:
    """Keep some rows alone, and no more than the last columns."""
    for held in _all_held(cache):
        kept = held.tensor[rows]
        held.tensor = kept[..., max(0, kept.shape[-2] - columns) :, :] if held.of_tokens else kept
    _note_columns(cache, columns)


def put_rows(cache: Any, others: Any, rows: list[int], count: int, columns: int) -> None:
    """Put the rows of another cache into one.

    Args:
        cache: has `count` rows afterwards, or had them.
        others: its rows are aligned with those of `cache` at their ends.
        rows: where they go.
        columns: of the longer of the two.
    """
    for ours, its in zip(_all_held(cache), _all_held(others), strict=True):
        held, new = ours.tensor, its.tensor
        wider = max(0, new.shape[-2] - held.shape[-2]) if ours.of_tokens else 0
        if wider or count > len(held):
            inner = [0, 0, wider, 0, *[0, 0] * (held.ndim - 3)] if ours.of_tokens else [0, 0] * (held.ndim - 1)
            held = pad(held, [*inner, 0, count - len(held)])
        if ours.of_tokens:
            held[rows, ..., held.shape[-2] - new.shape[-2] :, :] = new
        else:
            held[rows] = new
        ours.tensor = held
    _note_columns(cache, columns)


def align_ends(cache: Any, empty: list[int]) -> None:
    """Move the empty columns of each row, which come last, before the others."""
    for held in _all_held(cache):
        held.tensor = torch.stack([row.roll(columns, -2) for row, columns in zip(held.tensor, empty, strict=True)])


def token_bytes(cache: Any) -> int:
    """Bytes of what one token of one row takes."""
    held = [each.tensor for each in _all_held(cache) if each.of_tokens]
    return sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[-2]) for tensor in held)


def layers_of(cache: Any) -> list[Any]:
    """What holds the tensors of a cache.

    Raises:
        BatchingError: nothing of which that is known.
    """
    layers = getattr(cache, "layers", None)
    if not layers:
        raise BatchingError(f"no row can be added to a {type(cache).__name__}")
    return [part for layer in layers for part in getattr(layer, "parts", (layer,))]  # one in int8 is made of two


def _note_columns(cache: Any, columns: int) -> None:
    for layer in layers_of(cache):
        if hasattr(layer, "cumulative_length"):  # of a window that slides: of all columns, also those it left
            layer.cumulative_length = columns


def _all_held(cache: Any) -> Iterator[_Held]:
    """Every tensor that has rows.

    Raises:
        BatchingError: there is one of which it is not known how rows are added to it.
    """
    for holder in (cache, *layers_of(cache)):
        for name, value in vars(holder).items():
            if isinstance(value, torch.Tensor) and value.ndim > 1:
                if name not in _ALIGNED:
                    raise BatchingError(f"it is not known how to add a row to {type(holder).__name__}.{name}")
                yield _Held(vars(holder), name, True)
            elif isinstance(value, (list, dict)) and name != "layers":
                for key in range(len(value)) if isinstance(value, list) else value:
                    if isinstance(value[key], torch.Tensor) and value[key].ndim > 1:
                        yield _Held(value, key, False)
