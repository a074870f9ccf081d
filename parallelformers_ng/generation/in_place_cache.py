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
        keys, values: weak references to tensors `[…, tokens, width]`.
        room: capacity of the memory in tokens.
    """

    owner: int
    keys: weakref.ref[Tensor]
    values: weakref.ref[Tensor]
    room: int

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
            layer._room = own._replace(keys=weakref.ref(layer.keys), values=weakref.ref(layer.values))

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
        room = own.room
    else:
        room = end + max(end // 4, LEAST_SPARE_TOKENS)
        keys, values = _moved(keys, key_like, room), _moved(values, value_like, room)
    layer.keys, layer.values = _reaching(keys, key_like, end), _reaching(values, value_like, end)
    layer._room = _Room(id(layer), weakref.ref(layer.keys), weakref.ref(layer.values), room)
    return layer.keys, layer.values


def _follows(old: Tensor, new: Tensor) -> bool:
    """Return whether `new` can be appended to `old` without a cast: same data type, same shape except tokens.

    Otherwise `torch.cat` promotes the data types, or raises an error for the shapes.
    """
    if old.dtype is not new.dtype:
        return False
    mine, its = old.shape, new.shape
    return mine == (0,) or (mine[-1] == its[-1] and mine[:-2] == its[:-2])


def _moved(old: Tensor, new: Tensor, room: int) -> Tensor:
    """Copy `old` to new memory with a capacity of `room` tokens, and return the copy."""
    *lead, _, width = new.shape
    roomy = new.new_empty((*lead, room, width))
    return roomy.narrow(-2, 0, old.shape[-2]).copy_(old) if old.numel() else roomy


def _reaching(old: Tensor, like: Tensor, end: int) -> Tensor:
    """Return a view of the memory of `old` with `end` tokens; that memory must have the capacity for `end` tokens."""
    *lead, _, width = like.shape
    return old.as_strided((*lead, end, width), old.stride())
