"""Defines static caches that keep their memory between calls of `generate`, as CUDA graphs require."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticCache, StaticLayer, StaticSlidingWindowLayer

# Cache lengths are rounded up to a multiple of this number of tokens, so that slightly longer calls can reuse a cache.
LENGTH_STEP = 128


def bucket_of(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


class ReusableLayer(StaticLayer):
    """A static cache layer whose memory several calls of `generate` use, one after another.

    The memory has room for a power of two of rows; a call uses the first rows, of which `keys` and `values` are views.
    So transformers can use the layer as its own static layer. `renew` prepares the layer for the next call.

    Attributes:
        keys, values: keys and values of the call's rows, `[rows, heads, tokens, width]`.
        whole: (keys, values) of all rows; None before the first use.
        on_move: function that is called after the layer has allocated new memory.
    """

    keys: Any
    values: Any
    whole: tuple[Tensor, Tensor] | None
    on_move: Callable[[], None]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate memory for the rows of `key_states`, or clear the existing memory if it is large enough."""
        rows = key_states.shape[0]
        if self.whole is None or not _fits(self.whole[0], key_states) or not _fits(self.whole[1], value_states):
            shape = (bucket_of(rows), -1, -1, -1)
            super().lazy_initialization(key_states[:1].expand(shape), value_states[:1].expand(shape))
            self.whole = self.keys, self.values
            self.on_move()
        else:
            for memory in self.whole:
                memory.zero_()  # a NaN of an earlier call would spread, even from a masked position
        self.batch_size = rows
        self.narrow(rows)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] > 1 or not self.is_initialized or not _tokens_are_placed_alike():
            return super().update(key_states, value_states, *args, **kwargs)
        return self._place(key_states, value_states)

    def _place(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Append one token, `[rows, heads, 1, width]`, with two kernels less than transformers' static layer."""
        position = self.cumulative_length.view(1)
        self.keys.index_copy_(2, position, key_states)
        self.values.index_copy_(2, position, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values

    def release(self) -> None:
        """Free the memory, even if other objects still refer to this layer."""
        self.whole = self.keys = self.values = None
        self.is_initialized = False

    def renew(self) -> None:
        """Remove all tokens, but keep the memory."""
        self.is_initialized = False
        self.cumulative_length.zero_()

    def narrow(self, rows: int) -> None:
        """Make `keys` and `values` views of the first `rows` rows. The layer must have memory."""
        assert self.whole is not None
        self.keys, self.values = (memory[:rows] for memory in self.whole)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for states in (self.keys, self.values):
            states.copy_(states.index_select(0, beam_idx.to(states.device)))


class ReusableWindowLayer(ReusableLayer, StaticSlidingWindowLayer):
    """A reusable layer for sliding-window attention, which keeps only the tokens of the window."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[-2] > 1 or not self.is_full:
            return super(ReusableLayer, self).update(key_states, value_states, *args, **kwargs)
        self.cumulative_length_int += 1
        # transformers would copy an index from the host to the device here, which no CUDA graph can record.
        for states, new in ((self.keys, key_states), (self.values, value_states)):
            states.copy_(torch.cat((states[:, :, 1:], new), dim=-2))
        return self.keys, self.values

    @property
    def is_full(self) -> bool:
        return self.is_initialized and self.cumulative_length_int >= self.max_cache_len

    def renew(self) -> None:
        super().renew()
        self.cumulative_length_int = 0


@functools.cache
def _tokens_are_placed_alike() -> bool:
    """Return whether the installed transformers stores and counts a new token as `ReusableLayer._place` does."""
    with torch.inference_mode(), torch.device("cpu"):
        states, own, stock = torch.arange(1.0, 9.0).view(2, 1, 2, 2), ReusableLayer(4), StaticLayer(4)
        own.whole, own.on_move = None, lambda: None
        for layer in (own, stock):
            layer.update(states, -states)
        token = states[:, :, :1]
        placed, usual = own._place(token, -token), stock.update(token, -token)
        return all(map(torch.equal, (*placed, own.cumulative_length), (*usual, stock.cumulative_length)))


_REUSABLE: dict[type, type[ReusableLayer]] = {StaticLayer: ReusableLayer, StaticSlidingWindowLayer: ReusableWindowLayer}
EMPTY = "DummyLayer"  # a name, because some versions of transformers lack the class
_PLAIN = dict(zip(_REUSABLE.values(), _REUSABLE, strict=True))


def unsupported_layer(cache: Cache) -> str:
    """Return the class name of a cache, or of its first layer, that cannot be reused; "" if all can."""
    if type(cache) is not StaticCache:
        return type(cache).__name__
    names = (type(layer).__name__ for layer in cache.layers if type(layer) not in _REUSABLE)
    return next((name for name in names if name != EMPTY), "")


def cache_without_windows(config: PreTrainedConfig, length: int) -> StaticCache:
    """Return a static cache whose layers all have room for `length` tokens. In layers with a sliding window, the
    attention mask must hide the older tokens."""
    cache = StaticCache(config, max_cache_len=length)
    cache.layers = [StaticLayer(length) if type(layer) is StaticSlidingWindowLayer else layer for layer in cache.layers]
    return cache


class ReusableCache:
    """A static cache of transformers whose memory is used by one call after another.

    Args:
        cache: a new, unused cache without any `unsupported_layer`; its layers become reusable.
        length: number of tokens for which the cache has room.

    Attributes:
        layers: layers with keys and values.
        steps: key of a step → its `CapturedStep`; None after the first step with this key, or the reason (text) why
            such steps are not recorded. The CUDA graphs are destroyed if a layer allocates new memory.
    """

    def __init__(self, cache: StaticCache, length: int) -> None:
        self.cache = cache
        self.length = length
        self.steps: dict[Any, Any] = {}
        self.layers: list[Any] = [layer for layer in cache.layers if type(layer) in _REUSABLE]
        for layer in self.layers:
            layer.__class__ = _REUSABLE[type(layer)]
            layer.whole, layer.on_move = None, self.forget_steps
        _tokens_are_placed_alike()  # the check must not run for the first time in a recorded step
        self._windows = [layer for layer in self.layers if isinstance(layer, ReusableWindowLayer)]

    def forget_steps(self) -> None:
        """Destroy all CUDA graphs. A graph and its cache refer to each other, so both would stay in memory."""
        for step in self.steps.values():
            if step is not None and not isinstance(step, str):
                step.destroy()
        self.steps.clear()

    def release(self) -> None:
        """Destroy all CUDA graphs and free the memory, even if other objects still refer to this cache."""
        self.forget_steps()
        for layer in self.layers:
            layer.release()

    def renew(self) -> StaticCache:
        """Remove all tokens, and return the cache for a new call."""
        for layer in self.layers:
            layer.renew()
        return self.cache

    def fill(self, growing: Sequence[Any], rows: int, columns: int) -> None:
        """Copy the keys and values of a growing cache into this cache, and clear all other positions.

        Args:
            growing: layers of the growing cache, one for each of `layers`, with at most `rows` rows. A layer with a
                sliding window may lack the oldest tokens.
            rows: number of rows to use in this cache, a power of two.
            columns: number of tokens of the growing cache, at most `length`.
        """
        for layer, source in zip(self.layers, growing, strict=True):
            layer.renew()
            layer.lazy_initialization(*(each[:1].expand(rows, -1, -1, -1) for each in (source.keys, source.values)))
            count, _, kept, _ = source.keys.shape
            for target, states in zip(layer.whole, (source.keys, source.values), strict=True):
                target[:count, :, columns - kept : columns].copy_(states)
            layer.cumulative_length.fill_(columns)

    @property
    def is_begun(self) -> bool:
        return any(layer.is_initialized for layer in self.layers)

    @property
    def is_filled(self) -> bool:
        return all(layer.is_initialized for layer in self.layers)

    @property
    def rows(self) -> int:
        """Number of rows for which the memory has room, after the first use."""
        return self.layers[0].whole[0].shape[0]

    @property
    def phase(self) -> tuple[bool, ...]:
        """Whether the window of each window layer is full. A layer does other work after that, so each combination
        needs its own CUDA graph."""
        return tuple(layer.is_full for layer in self._windows)

    def advance(self) -> None:
        """Count one token in the window layers after a replay, because a replay runs no Python."""
        for layer in self._windows:
            layer.cumulative_length_int += 1

    @contextlib.contextmanager
    def widened(self, rows: int) -> Iterator[None]:
        """Inside the `with` block, let a step use the first `rows` rows. Rows and token counts are restored
        afterwards."""
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
        """Return (tensor, copy of the tensor) for every tensor of the cache."""
        tensors = [tensor for layer in self.layers for tensor in (layer.keys, layer.values, layer.cumulative_length)]
        return [(tensor, _copied(tensor)) for tensor in tensors]


def handed_out(cache: Cache) -> Cache:
    """Return a copy of a reusable cache, with transformers' own layers, for the caller: the next call overwrites the
    original. Other caches are returned unchanged."""
    if not any(isinstance(layer, ReusableLayer) for layer in getattr(cache, "layers", ())):
        return cache
    copied = copy.copy(cache)
    copied.layers = [_plain_copy(layer) if isinstance(layer, ReusableLayer) else layer for layer in cache.layers]
    return copied


def _copied(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone()
    except torch.OutOfMemoryError:
        return tensor.to("cpu")  # slow, but needed only to compare a CUDA graph


def _plain_copy(layer: Any) -> StaticLayer:
    copied = copy.copy(layer)
    copied.__class__ = _PLAIN[type(layer)]
    del copied.whole, copied.on_move
    for name, value in vars(copied).items():
        if isinstance(value, Tensor):
            setattr(copied, name, value.clone())
    return copied


def _fits(memory: Tensor, states: Tensor) -> bool:
    """Return whether the memory has room for the rows of `states`, `[rows, heads, new tokens, width]`."""
    same = memory.dtype == states.dtype and memory.device == states.device
    shapes_fit = memory.shape[1] == states.shape[1] and memory.shape[3] == states.shape[3]
    return same and shapes_fit and states.shape[0] <= memory.shape[0]
