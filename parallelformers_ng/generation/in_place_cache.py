"""Makes key/value caches grow in place: a step writes its tokens into spare memory behind the earlier tokens.

transformers instead copies all keys and values of a layer into a longer tensor at each step.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

LEAST_SPARE_TOKENS = 128


class _Room(NamedTuple):
    """The newest key and value tensors of a layer, and the capacity of their memory.

    Only this layer may write into the spare memory, and only while the layer's keys and values are these very tensors.
    After a reorder or a copy, the layer first copies its keys and values to new memory. After a crop the layer also
    copies them if other code holds tensors of the same memory, because a later token would overwrite cropped tokens.

    Attributes:
        owner: id of the layer.
        keys, values: weak references to tensors `[batch, …, tokens, width]`.
        room: capacity of the memory in tokens.
        rows: capacity of the memory in sequences of the batch.
    """

    owner: int
    keys: weakref.ref[Tensor]
    values: weakref.ref[Tensor]
    room: int
    rows: int

    @classmethod
    def of(cls, layer: Any, room: int, rows: int) -> _Room:
        return cls(id(layer), weakref.ref(layer.keys), weakref.ref(layer.values), room, rows)

    def fits(self, layer: Any, end: int) -> bool:
        """Return whether a layer may write tokens up to `end` (exclusive) into the memory of its keys and values."""
        mine = self.owner == id(layer) and self.keys() is layer.keys and self.values() is layer.values
        return mine and end <= self.room


def append_in_place() -> None:
    """Make every `DynamicLayer` of this process append in place, from now on, also after a crop. Idempotent.

    A layer still copies its keys and values outside of inference mode and in compiled code. A layer also copies if the
    new keys or values have another data type or another shape, except for the number of tokens.
    """
    if not hasattr(DynamicLayer.update, "__wrapped__"):
        DynamicLayer.update = _in_place(DynamicLayer.update)
        DynamicLayer.crop = _keeping_room(DynamicLayer.crop)


def _keeping_room(crop: Any) -> Any:
    @functools.wraps(crop)
    def cropped(layer: Any, *args: Any, **kwargs: Any) -> None:
        own: _Room | None = getattr(layer, "_room", None)
        begin = (layer.keys.data_ptr(), layer.values.data_ptr()) if own is not None and own.fits(layer, 0) else None
        crop(layer, *args, **kwargs)
        if own is None or begin is None or (layer.keys.data_ptr(), layer.values.data_ptr()) != begin:
            return
        if _has_sole_view(layer.keys) and _has_sole_view(layer.values):
            layer._room = _Room.of(layer, own.room, own.rows)

    return cropped


def _has_sole_view(tensor: Tensor) -> bool:
    """Return whether no other tensor refers to the memory of a tensor."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses == 2  # the tensor, and the storage object of this call


def _in_place(concatenate: Any) -> Any:
    @functools.wraps(concatenate)
    def update(
        layer: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not torch.is_inference_mode_enabled() or torch.compiler.is_compiling():
            return concatenate(layer, key_states, value_states, *args, **kwargs)
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        if not (_follows(layer.keys, key_states) and _follows(layer.values, value_states)):
            return concatenate(layer, key_states, value_states, *args, **kwargs)
        tokens = key_states.shape[-2]
        keys, values = extended(layer, tokens, key_states, value_states)
        keys.narrow(-2, keys.shape[-2] - tokens, tokens).copy_(key_states)
        values.narrow(-2, values.shape[-2] - tokens, tokens).copy_(value_states)
        return keys, values

    return update


def extended(
    layer: Any, tokens: int, key_like: Tensor | None = None, value_like: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Lengthen a layer's keys and values by `tokens` tokens, which the caller then writes. In inference mode only.

    Args:
        layer: a `DynamicLayer` of transformers; changed.
        tokens: number of tokens to add.
        key_like, value_like: tensors `[batch, heads, …, width]` that give shape and data type; needed if the layer is
            empty.

    Returns:
        New keys and values of the layer, each `[batch, heads, tokens, width]`.
    """
    keys, values = layer.keys, layer.values
    key_like, value_like = keys if key_like is None else key_like, values if value_like is None else value_like
    end = (keys.shape[-2] if keys.numel() else 0) + tokens
    own: _Room | None = getattr(layer, "_room", None)
    if own is not None and own.fits(layer, end):
        room, rows = own.room, own.rows
    else:
        room = end + max(end // 4, LEAST_SPARE_TOKENS)
        rows = own.rows if own is not None and own.fits(layer, 0) else key_like.shape[0]
        keys, values = _moved(keys, key_like, rows, room), _moved(values, value_like, rows, room)
    layer.keys, layer.values = _reaching(keys, key_like, end), _reaching(values, value_like, end)
    layer._room = _Room.of(layer, room, rows)
    return layer.keys, layer.values


def spread(layer: Any, rows: int, columns: int) -> None:
    """Give a layer more sequences, and more tokens before its tokens. The new keys and values are 0.

    On CPU, the memory has room for twice the sequences: unused memory costs nothing, and later sequences no copy.

    Args:
        layer: a `DynamicLayer` of transformers with keys and values `[batch, heads, tokens, width]`; changed.
        rows: number of sequences afterwards, at least the number of now.
        columns: number of tokens of each sequence afterwards, at least the number of now.
    """
    own: _Room | None = getattr(layer, "_room", None)
    before, *_, tokens, _ = layer.keys.shape
    if own is not None and own.fits(layer, columns) and rows <= own.rows and columns == tokens:
        room, most = own.room, own.rows
        layer.keys, layer.values = (
            old.as_strided((rows, *old.shape[1:]), old.stride()) for old in (layer.keys, layer.values)
        )
        for states in (layer.keys, layer.values):
            states[before:].zero_()
    else:
        room, most = columns + LEAST_SPARE_TOKENS, rows * 2 if layer.keys.is_cpu else rows
        layer.keys, layer.values = (_spread(old, most, room, rows, columns) for old in (layer.keys, layer.values))
    layer._room = _Room.of(layer, room, most)


def _follows(old: Tensor, new: Tensor) -> bool:
    """Return whether `new` can be appended to `old` without a cast: same data type, same shape except tokens.

    Otherwise `torch.cat` promotes the data types, or raises an error for the shapes.
    """
    if old.dtype is not new.dtype:
        return False
    mine, its = old.shape, new.shape
    return mine == (0,) or (mine[-1] == its[-1] and mine[:-2] == its[:-2])


def _moved(old: Tensor, new: Tensor, rows: int, room: int) -> Tensor:
    """Copy `old` to new memory with a capacity of `rows` sequences and `room` tokens, and return the copy."""
    batch, *lead, _, width = new.shape
    roomy = new.new_empty((rows, *lead, room, width))[:batch]
    return roomy.narrow(-2, 0, old.shape[-2]).copy_(old) if old.numel() else roomy


def _spread(old: Tensor, most: int, room: int, rows: int, columns: int) -> Tensor:
    """Copy `old`, `[batch, heads, tokens, width]`, to the last columns of the first rows of new memory.

    Returns:
        `[rows, heads, columns, width]`, in memory with a capacity of `most` rows and `room` columns.
    """
    batch, heads, tokens, width = old.shape
    spread = old.new_empty((most, heads, room, width))[:rows, :, :columns]
    spread[:batch, :, columns - tokens :] = old
    spread[:batch, :, : columns - tokens] = 0
    spread[batch:] = 0
    return spread


def _reaching(old: Tensor, like: Tensor, end: int) -> Tensor:
    """Return a view of the memory of `old` with `end` tokens; that memory must have the capacity for `end` tokens."""
    *lead, _, width = like.shape
    return old.as_strided((*lead, end, width), old.stride())
