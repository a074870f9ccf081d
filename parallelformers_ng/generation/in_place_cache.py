"""Makes KV caches grow in place: a step writes its tokens into spare memory behind the earlier tokens.

transformers instead copies all keys and values of a layer into a longer tensor at each step.
"""

from __future__ import annotations

import operator
import struct
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from parallelformers_ng.generation.paged_memory import PagedRows
from parallelformers_ng.generation.wrapping import wrap_once

MIN_SPARE_TOKENS = 128
# Maximum size of a `JointRoom`, because all of its memory exists twice while it grows. Larger caches grow layer by
# layer.
MAX_JOINT_BYTES = 64 << 20


class _Room(NamedTuple):
    """The newest key and value tensors of a layer, and how many tokens and sequences their memory has room for.

    Only this layer may write into the spare memory, and only while the layer's keys and values are these very tensors.
    After a reorder or a copy, the layer first copies its keys and values to new memory. After a crop the layer also
    copies them if other code has tensors of the same memory, because a later token would overwrite cropped tokens.
    """

    owner: int
    keys: weakref.ref[Tensor]
    values: weakref.ref[Tensor]
    room: int
    rows: int
    pages: tuple[PagedRows, PagedRows] | None  # memory of keys and of values, if it is paged

    @classmethod
    def of(cls, layer: Any, room: int, rows: int, pages: tuple[PagedRows, PagedRows] | None = None) -> _Room:
        return cls(id(layer), weakref.ref(layer.keys), weakref.ref(layer.values), room, rows, pages)

    def fits(self, layer: Any, end: int) -> bool:
        """Whether a layer may write tokens up to `end` (exclusive) into the memory of its keys and values."""
        mine = self.owner == id(layer) and self.keys() is layer.keys and self.values() is layer.values
        return mine and end <= self.room


class JointRoom:
    """Memory for the keys and values of all layers of a cache with one sequence, `[2 · layers, 1, heads, room, width]`.

    One call of `unbind` makes the longer key and value tensors of all layers. A call for each layer would take longer
    than the kernels of a small model. As for `_Room`, only these layers may write into the spare memory.

    Args:
        layers: layers of the cache, all empty or all with the same shape and data type; they get views of this memory.
        like: tensor `[1, heads, …, width]` with the data type and device of the keys.
        end: number of tokens for which there must be room.

    Attributes:
        addresses: results of `addresses_of` for all layers, as 64-bit numbers.
    """

    def __init__(self, layers: Sequence[Any], like: Tensor, end: int) -> None:
        self._views: list[weakref.ref[Tensor]] = []
        _, heads, _, width = like.shape
        self._room = _with_spare(end)
        memory = like.new_empty(2 * len(layers), 1, heads, self._room, width)
        self._shape, self._strides = memory.shape, memory.stride()
        tokens = layers[0].get_seq_length()
        for place, states in enumerate(_newest(layers) if tokens else ()):
            memory[place, :, :, :tokens] = states
        pairs = memory.unflatten(0, (-1, 2)).unbind()
        self.addresses = b"".join(struct.pack("=8Q", *addresses_of(keys, values)) for keys, values in pairs)
        self._show(layers, memory, tokens)

    @classmethod
    def fits(cls, layers: Sequence[Any], like: Tensor, end: int) -> bool:
        bytes_of_token = 2 * len(layers) * like.shape[1] * like.shape[3] * like.itemsize
        return like.shape[0] == 1 and end * bytes_of_token <= MAX_JOINT_BYTES

    def holds(self, layers: Sequence[Any]) -> bool:
        newest = _newest(layers)
        return len(newest) == len(self._views) and all(map(operator.is_, newest, [view() for view in self._views]))

    def lengthen(self, layers: Sequence[Any], tokens: int) -> bool:
        """Make all keys and values longer by `tokens` tokens, which the caller must write; return False without room.

        A negative number removes the last tokens. If other code has tensors of this memory, the layers then no longer
        use the memory, because later tokens would overwrite the removed ones.
        """
        end = self._end + tokens
        if not 0 < end <= self._room:
            return False
        if tokens:
            self._show(layers, layers[0].keys.as_strided(self._shape, self._strides, 0), end)
        if tokens < 0 and _views_of(layers[0].keys) != len(self._views):
            self._views = []
        return True

    def _show(self, layers: Sequence[Any], memory: Tensor, end: int) -> None:
        self._end = end
        views = memory.narrow(3, 0, end).unbind()
        for layer, keys, values in zip(layers, views[::2], views[1::2], strict=True):
            layer.keys, layer.values = keys, values
        self._views = list(map(weakref.ref, views))


_joint_rooms: weakref.WeakKeyDictionary[DynamicCache, JointRoom] = weakref.WeakKeyDictionary()


def joint_room(cache: DynamicCache, layers: Sequence[Any]) -> JointRoom | None:
    """Return the `JointRoom` of a cache if it contains the newest keys and values of all these layers."""
    room = _joint_rooms.get(cache)
    return room if room is not None and room.holds(layers) else None


def extended_jointly(cache: DynamicCache, layers: Sequence[Any], tokens: int, like: Tensor) -> bytes | None:
    """Make all layers of a cache longer by `tokens` tokens, which the caller must write. In inference mode only.

    Args:
        layers: `DynamicLayer`s of transformers with equally many tokens; changed.
        like: tensor `[sequences, heads, …, width]` that gives shape and data type of keys and values.

    Returns:
        `JointRoom.addresses`; None if the layers cannot share memory, and are unchanged.
    """
    room = joint_room(cache, layers)
    if room is None or not room.lengthen(layers, tokens):
        end = _expected(layers[0], layers[0].get_seq_length() + tokens)
        if not JointRoom.fits(layers, like, end):
            return None
        for layer in layers:
            layer._room = None  # frees the memory of a batch whose last row runs on alone
            if not layer.is_initialized:
                layer.lazy_initialization(like, like)
        room = _joint_rooms[cache] = JointRoom(layers, like, end)
        room.lengthen(layers, tokens)
    return room.addresses


def expect(layers: Sequence[Any], tokens: int) -> None:
    """Make room for `tokens` tokens when the layers next allocate memory.

    A long prompt runs in chunks. With room for the whole prompt, no chunk copies the keys and values of earlier chunks.
    """
    for layer in layers:
        layer._expected_tokens = tokens


def _expected(layer: Any, end: int) -> int:
    return max(end, getattr(layer, "_expected_tokens", 0))


def addresses_of(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """Return the addresses of keys and values; then, for each of them, the strides in elements of sequences, heads and
    tokens. C kernels take the eight numbers in this order (`Cached` of `_queries.h`)."""
    return keys.data_ptr(), values.data_ptr(), *keys.stride()[:3], *values.stride()[:3]


def _with_spare(tokens: int) -> int:
    return tokens + max(tokens // 4, MIN_SPARE_TOKENS)


def _newest(layers: Sequence[Any]) -> list[Tensor]:
    return [states for layer in layers for states in (layer.keys, layer.values)]


def append_in_place() -> None:
    """Patch `DynamicLayer` so that it appends tokens in place, also after a crop. Idempotent.

    A layer still copies its keys and values outside of inference mode and in compiled code, and for new keys or values
    of another data type or shape.
    """
    wrap_once(DynamicLayer, "update", _in_place)
    wrap_once(DynamicLayer, "crop", _keeping_room)
    wrap_once(DynamicCache, "crop", _keeping_joint_room)


def _keeping_room(crop: Any) -> Any:
    def cropped(layer: Any, *args: Any, **kwargs: Any) -> None:
        own: _Room | None = getattr(layer, "_room", None)
        begin = (layer.keys.data_ptr(), layer.values.data_ptr()) if own is not None and own.fits(layer, 0) else None
        crop(layer, *args, **kwargs)
        if own is None or begin is None or (layer.keys.data_ptr(), layer.values.data_ptr()) != begin:
            return
        if _has_sole_view(layer.keys) and _has_sole_view(layer.values):
            layer._room = _Room.of(layer, own.room, own.rows)

    return cropped


def _keeping_joint_room(crop: Any) -> Any:
    def cropped(cache: Any, tokens_to_remove: int) -> None:
        room = _joint_rooms.get(cache) if tokens_to_remove <= 0 else None
        if room is None or not room.holds(cache.layers) or not room.lengthen(cache.layers, tokens_to_remove):
            crop(cache, tokens_to_remove)

    return cropped


def _has_sole_view(tensor: Tensor) -> bool:
    return _views_of(tensor) == 1


def _views_of(tensor: Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses - 1  # the storage object that this call creates counts as a use


def _in_place(concatenate: Any) -> Any:
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
    """Make a layer's keys and values longer by `tokens` tokens, which the caller must write. In inference mode only.

    For an empty layer, `key_like` and `value_like`, `[batch, heads, …, width]`, give shape and data type.
    """
    keys, values = layer.keys, layer.values
    key_like, value_like = keys if key_like is None else key_like, values if value_like is None else value_like
    end = (keys.shape[-2] if keys.numel() else 0) + tokens
    own: _Room | None = getattr(layer, "_room", None)
    if own is not None and own.pages is not None and own.fits(layer, 0) and not own.fits(layer, end):
        own = _paged(layer, own.rows, end)  # all columns have been used
        keys, values = layer.keys, layer.values
    if own is not None and own.fits(layer, end):
        room, rows, pages = own.room, own.rows, own.pages
    else:
        pages = None
        room = _with_spare(_expected(layer, end))
        rows = own.rows if own is not None and own.fits(layer, 0) else key_like.shape[0]
        keys, values = _moved(keys, key_like, rows, room), _moved(values, value_like, rows, room)
    layer.keys, layer.values = _reaching(keys, key_like, end), _reaching(values, value_like, end)
    layer._room = _Room.of(layer, room, rows, pages)
    return layer.keys, layer.values


def spread(layer: Any, rows: int, columns: int) -> None:
    """Enlarge a layer of a KV cache to `rows` sequences and `columns` tokens. New sequences are zeros at the end, new
    tokens are zeros at the start of each sequence.

    On CPU, the memory is in pages (`PagedRows`), so that later sequences and longer ones need no copy, and zeros take
    no memory.
    """
    before, *_, tokens, _ = layer.keys.shape
    if (rows, columns) == (before, tokens):
        return
    pages = _pages_of(layer)
    if layer.keys.is_cpu and (pages is None or not pages[0].fits(rows, columns - tokens)):
        room = _paged(layer, 2 * rows, columns)
        pages = None if room is None else room.pages
    if pages is not None:
        for each in pages:
            each.begin -= columns - tokens
        _show(layer, pages, rows, columns)
        return
    layer.keys, layer.values = (_spread(old, rows, columns) for old in (layer.keys, layer.values))
    layer._room = _Room.of(layer, columns + MIN_SPARE_TOKENS, rows)


def free_rows(layer: Any, rows: Sequence[int]) -> bool:
    """Make sequences of a layer zeros without memory. Return False, and do nothing, if its memory is not in pages."""
    pages = _pages_of(layer)
    for each in pages or ():
        each.free(rows)
    return pages is not None


def keep_paged_rows(layer: Any, rows: list[int], columns: int) -> bool:
    """Keep some sequences of a layer, in ascending order, and their last `columns` tokens. Return False, and do
    nothing, if the layer's memory is not in pages."""
    pages = _pages_of(layer)
    if pages is None:
        return False
    for each in pages:
        each.keep(rows, len(layer.keys), columns, dropped=layer.keys.shape[2] - columns)
    _show(layer, pages, len(rows), columns)
    return True


def _pages_of(layer: Any) -> tuple[PagedRows, PagedRows] | None:
    room: _Room | None = getattr(layer, "_room", None)
    return room.pages if room is not None and room.fits(layer, 0) else None


def _paged(layer: Any, rows: int, columns: int) -> _Room | None:
    """Move a layer's keys and values to pages; do nothing and return None if the system gives no address space."""
    count, _, tokens, _ = layer.keys.shape
    try:
        pages = PagedRows(layer.keys, rows, columns), PagedRows(layer.values, rows, columns)
    except OSError:
        return None
    return _show(layer, pages, count, tokens)


def _show(layer: Any, pages: tuple[PagedRows, PagedRows], rows: int, columns: int) -> _Room:
    layer.keys, layer.values = (each.view(rows, columns) for each in pages)
    room = layer._room = _Room.of(layer, pages[0].room - pages[0].begin, pages[0].rows, pages)
    return room


def _follows(old: Tensor, new: Tensor) -> bool:
    # Appending in place neither promotes data types nor raises the error for other shapes, as `torch.cat` does.
    if old.dtype is not new.dtype:
        return False
    mine, its = old.shape, new.shape
    return mine == (0,) or (mine[-1] == its[-1] and mine[:-2] == its[:-2])


def _moved(old: Tensor, new: Tensor, rows: int, room: int) -> Tensor:
    batch, *lead, _, width = new.shape
    roomy = new.new_empty((rows, *lead, room, width))[:batch]
    return roomy.narrow(-2, 0, old.shape[-2]).copy_(old) if old.numel() else roomy


def _spread(old: Tensor, rows: int, columns: int) -> Tensor:
    """Return a view `[rows, heads, columns, width]` of memory with spare tokens. The view has the old sequences first
    and the old tokens last; the rest is 0."""
    batch, heads, tokens, width = old.shape
    spread = old.new_zeros((rows, heads, columns + MIN_SPARE_TOKENS, width))[:, :, :columns]
    spread[:batch, :, columns - tokens :] = old
    return spread


def _reaching(old: Tensor, like: Tensor, end: int) -> Tensor:
    """Return a view of the memory of `old` with `end` tokens."""
    *lead, _, width = like.shape
    return old.as_strided((*lead, end, width), old.stride())
