"""Static caches whose memory stays where it is from one call of `generate` to the next, as a captured step needs it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer

LENGTH_STEP = 128
"""Tokens by which a cache grows, so that calls a little longer than the last find it long enough."""


def bucket_of(rows: int) -> int:
    """Return the rows that memory is taken for: the next power of two, 1, 2, 4, 8, …."""
    return 1 << (rows - 1).bit_length()


class ReusableLayer(StaticLayer):
    """A layer with memory for a bucket of rows. A call uses the first few.

    `keys` and `values`, `[rows, heads, tokens, width]`, are views of it, so that whatever transformers does with a
    layer it does as in one of its own. `renew` makes it look as it did before its first use.

    Attributes:
        whole: keys and values of all rows of the bucket, None before the first use.
        on_move: called when that memory is taken anew.
    """

    keys: Any
    values: Any
    whole: tuple[Tensor, Tensor] | None
    on_move: Callable[[], None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = key_states.shape[0]
        if self.whole is None or not _fits(self.whole[0], key_states) or not _fits(self.whole[1], value_states):
            shape = (bucket_of(rows), -1, -1, -1)
            super().lazy_initialization(key_states[:1].expand(shape), value_states[:1].expand(shape))
            self.whole = self.keys, self.values
            self.on_move()
        else:
            for memory in self.whole:
                memory.zero_()  # a masked position counts for nothing only where it holds a finite number
        self.batch_size = rows
        self.narrow(rows)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] > 1 or not self.is_initialized or not _tokens_are_placed_alike():
            return super().update(key_states, value_states, *args, **kwargs)
        return self._place(key_states, value_states)

    def _place(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Hold one more token, `[rows, heads, 1, width]`. The tensor that counts the tokens is its position;
        transformers makes another one of it, two kernels in each layer."""
        position = self.cumulative_length.view(1)
        self.keys.index_copy_(2, position, key_states)
        self.values.index_copy_(2, position, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def release(self) -> None:
        """Give up the memory, whoever refers to this layer."""
        self.whole = self.keys = self.values = None
        self.is_initialized = False

    def renew(self) -> None:
        """Forget what is held, but not the memory."""
        self.is_initialized = False
        self.cumulative_length.zero_()

    def narrow(self, rows: int) -> None:
        """Let `keys` and `values` be the first rows."""
        assert self.whole is not None
        self.keys, self.values = (memory[:rows] for memory in self.whole)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in (self.keys, self.values):
            states.copy_(states.index_select(0, beam_idx.to(states.device)))


class ReusableWindowLayer(ReusableLayer, StaticSlidingWindowLayer):
    """The same for a layer that keeps the last tokens only. It counts them in Python as well."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] > 1 or not self.is_initialized or not (self.is_full or _tokens_are_placed_alike()):
            return super(ReusableLayer, self).update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        if self.cumulative_length_int <= self.max_cache_len:
            return self._place(key_states, value_states)
        # transformers makes an index out of Python numbers here, which no capture admits
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states.copy_(torch.cat((states[:, :, 1:], new), dim=-2))
        return self.keys, self.values

    @property
    def is_full(self) -> bool:
        """Whether the next token pushes the oldest one out."""
        return self.is_initialized and self.cumulative_length_int >= self.max_cache_len

    def renew(self) -> None:
        super().renew()
        self.cumulative_length_int = 0


@functools.cache
def _tokens_are_placed_alike() -> bool:
    """Return whether the installed transformers puts a token where `ReusableLayer._place` does, and counts it alike."""
    with torch.inference_mode(), torch.device("cpu"):
        states = torch.arange(1.0, 9.0).view(2, 1, 2, 2)
        one = states[:, :, :1]
        for mine, theirs in (
            (ReusableLayer(4), StaticLayer(4)),
            (ReusableWindowLayer(4, 4), StaticSlidingWindowLayer(4, 4)),
        ):
            mine.whole, mine.on_move = None, lambda: None
            for layer in (mine, theirs):
                layer.update(states, -states)
            placed, usual = mine._place(one, -one), theirs.update(one, -one)
            if not all(map(torch.equal, (*placed, mine.cumulative_length), (*usual, theirs.cumulative_length))):
                return False
    return True


_REUSABLE: dict[type, type[ReusableLayer]] = {StaticLayer: ReusableLayer, StaticSlidingWindowLayer: ReusableWindowLayer}
_EMPTY = "DummyLayer"  # which holds nothing, and which not every transformers has
_PLAIN = dict(zip(_REUSABLE.values(), _REUSABLE, strict=True))


def unsupported_layer(cache: Cache) -> str:
    """Return the kind of cache, or of a layer in it, that has no reusable form; "" if all have."""
    if type(cache) is not StaticCache:
        return type(cache).__name__
    names = (type(layer).__name__ for layer in cache.layers if type(layer) not in _REUSABLE)
    return next((name for name in names if name != _EMPTY), "")


@runtime_checkable
class Recording(Protocol):
    """A recorded step."""

    def destroy(self) -> None:
        """Give up the recording, and what it keeps on the device."""


class ReusableCache:
    """A static cache of transformers whose memory serves one call after another.

    Args:
        cache: new, not used yet; see `unsupported_layer`.
        length: tokens that it has room for.

    Attributes:
        layers: layers that hold something.
        steps: recordings of the steps that write to it: None for a step seen once, a reason for a step that is
            not recorded. A layer that moves to other memory forgets them.
    """

    def __init__(self, cache: StaticCache, length: int) -> None:
        self.cache = cache
        self.length = length
        self.steps: dict[Any, Any] = {}
        self.layers: list[Any] = [layer for layer in cache.layers if type(layer) in _REUSABLE]
        for layer in self.layers:
            layer.__class__ = _REUSABLE[type(layer)]
            layer.whole, layer.on_move = None, self.forget_steps
        self._lent: list[Tensor] = []
        self._windows = [layer for layer in self.layers if isinstance(layer, ReusableWindowLayer)]
        _tokens_are_placed_alike()  # once, and not in the midst of a step

    def forget_steps(self) -> None:
        """Destroy what was recorded. A recording and its cache refer to each other, so that nothing else would."""
        for step in self.steps.values():
            if isinstance(step, Recording):
                step.destroy()
        self.steps.clear()

    def release(self) -> None:
        """Destroy what was recorded, and give up the memory, whoever refers to this cache."""
        self.forget_steps()
        self._lent = []
        for layer in self.layers:
            layer.release()

    def renew(self) -> StaticCache:
        """Return the cache as if it were new."""
        for layer in self.layers:
            layer.renew()
        return self.cache

    def take(self, growing: Cache, columns: int) -> None:
        """Hold what a cache that grows does, of `columns` tokens, with as many rows.

        Nothing is copied where that is what `lend` gave it, whatever was written there since.
        """
        tensors = [tensor for layer in growing.layers for tensor in (layer.keys, layer.values)]
        if len(tensors) == len(self._lent) and all(
            mine.is_set_to(its) for mine, its in zip(self._lent, tensors, strict=True)
        ):
            return
        for layer, its in zip(self.layers, growing.layers, strict=True):
            layer.renew()
            layer.lazy_initialization(its.keys, its.values)
            layer.keys[:, :, :columns].copy_(its.keys)
            layer.values[:, :, :columns].copy_(its.values)
            layer.cumulative_length.fill_(columns)

    def lend(self, growing: Cache, columns: int) -> None:
        """Let the other cache be the first `columns` tokens of this one. What it adds or leaves out, it copies."""
        for layer, its in zip(self.layers, growing.layers, strict=True):
            its.keys, its.values = layer.keys[:, :, :columns], layer.values[:, :, :columns]
        self._lent = [tensor for layer in growing.layers for tensor in (layer.keys, layer.values)]

    @property
    def is_begun(self) -> bool:
        """Whether the prompt has been through the model."""
        return any(layer.is_initialized for layer in self.layers)

    @property
    def is_filled(self) -> bool:
        """Whether every layer holds the prompt."""
        return all(layer.is_initialized for layer in self.layers)

    @property
    def rows(self) -> int:
        """Rows that there is memory for, after the first use."""
        return self.layers[0].whole[0].shape[0]

    @property
    def phase(self) -> tuple[bool, ...]:
        """Return the state that a step depends on besides tensors: which windows are full."""
        return tuple(layer.is_full for layer in self._windows)

    def advance(self) -> None:
        """Count the token of a step that ran without Python."""
        for layer in self._windows:
            layer.cumulative_length_int += 1

    @contextlib.contextmanager
    def widened(self, rows: int) -> Iterator[None]:
        """Within it, a step works on the first `rows` rows, and what it counts in Python is forgotten afterwards."""
        before = self.layers[0].keys.shape[0]
        counted = [layer.cumulative_length_int for layer in self._windows]
        for layer in self.layers:
            layer.narrow(rows)
        try:
            yield
        finally:
            for layer in self.layers:
                layer.narrow(before)
            for layer, count in zip(self._windows, counted, strict=True):
                layer.cumulative_length_int = count

    def snapshot(self) -> list[tuple[Tensor, Tensor]]:
        """Return every tensor of the cache with a copy of what it holds now."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
        return [(tensor, _copied(tensor)) for tensor in tensors]


def handed_out(cache: Cache) -> Cache:
    """Return the cache itself, or, of one that the next call writes over, a copy of transformers' own kind."""
    if not any(isinstance(layer, ReusableLayer) for layer in getattr(cache, "layers", ())):
        return cache
    copied = copy.copy(cache)
    copied.layers = [_plain_copy(layer) if isinstance(layer, ReusableLayer) else layer for layer in cache.layers]
    return copied


def _copied(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.to("cpu")  # slow, but only for as long as a recording is compared


def _plain_copy(layer: Any) -> StaticLayer:
    copied = copy.copy(layer)
    copied.__class__ = _PLAIN[type(layer)]
    del copied.whole, copied.on_move
    for name, value in vars(copied).items():
        if isinstance(value, Tensor):
            setattr(copied, name, value.clone())
    return copied


def _fits(memory: Tensor, states: Tensor) -> bool:
    """Return whether the memory has room for these rows of `[rows, heads, new tokens, width]`."""
    same = memory.dtype == states.dtype and memory.device == states.device
    shapes_fit = memory.shape[1] == states.shape[1] and memory.shape[3] == states.shape[3]
    return same and shapes_fit and states.shape[0] <= memory.shape[0]
