"""Key/value caches that grow in place: a step writes its tokens behind those that are held, where transformers copies
all of them into a longer tensor, layer by layer and token by token."""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

LEAST_SPARE_TOKENS = 128


class _Room(NamedTuple):
    """The tensors that a layer made last, and how much room they have. Only this layer may write behind them, and only
    while it still holds these very objects: what was cropped, reordered, copied or shared is moved once more.

    Attributes:
        owner: id of the layer.
        keys, values: `[…, tokens, width]`, weakly held.
        room: tokens that their memory has room for.
    """

    owner: int
    keys: weakref.ref[Tensor]
    values: weakref.ref[Tensor]
    room: int

    def fits(self, layer: Any, end: int) -> bool:
        """Return whether the layer may write up to token `end` behind what it holds."""
        mine = self.owner == id(layer) and self.keys() is layer.keys and self.values() is layer.values
        return mine and end <= self.room


def append_in_place() -> None:
    """From now on every `DynamicLayer` of this process appends in place. Idempotent."""
    if not hasattr(DynamicLayer.update, "__wrapped__"):
        DynamicLayer.update = _in_place(DynamicLayer.update)


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
    """Lengthen the layer's keys and values by so many tokens; the caller writes them. In inference mode only.

    Args:
        layer: a `DynamicLayer`.
        key_like, value_like: needed where it holds nothing yet, to say how wide it becomes.

    Returns:
        Its keys and values from now on, `[batch, heads, tokens, width]`.
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
    """Return whether both go into one tensor as they are. If not, `torch.cat` promotes them, or says what is wrong."""
    if old.dtype is not new.dtype:
        return False
    mine, its = old.shape, new.shape
    return mine == (0,) or (mine[-1] == its[-1] and mine[:-2] == its[:-2])


def _moved(old: Tensor, new: Tensor, room: int) -> Tensor:
    """`old` in memory with room for so many tokens."""
    *lead, _, width = new.shape
    roomy = new.new_empty((*lead, room, width))
    return roomy.narrow(-2, 0, old.shape[-2]).copy_(old) if old.numel() else roomy


def _reaching(old: Tensor, like: Tensor, end: int) -> Tensor:
    """`old`, whose memory reaches further than its tokens, up to token `end`."""
    *lead, _, width = like.shape
    return old.as_strided((*lead, end, width), old.stride())
