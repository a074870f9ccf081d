"""Key/value caches that stay in the worker: each rank keeps its own heads, the caller holds a handle."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from parallelformers_ng.generation.int8_layer import Int8Layer
from parallelformers_ng.wire.frame import Handle


@dataclass
class CacheInfo:
    """Facts about a cache, which a handle answers by itself.

    Attributes:
        module, name: place and name of the cache's class.
        lengths: tokens held by each layer, -1 for a layer that does not count them.
        batch_size: rows, -1 before the first update.
        flags: boolean or list-valued properties by name (`is_compileable`, `is_sliding`, …).
        subcaches: module and name of the classes of an encoder-decoder cache's subcaches.
    """

    module: str
    name: str
    lengths: list[int]
    batch_size: int
    flags: dict[str, Any]
    subcaches: dict[str, tuple[str, str]] = field(default_factory=dict)


SUBCACHES = ("self_attention_cache", "cross_attention_cache")
_FLAGS = ("is_compileable", "is_initialized", "is_croppable", "is_sliding", "is_linear", "is_dummy")


def info_of(cache: Cache) -> CacheInfo:
    """Look at a cache. Lengths do not depend on the rank: each holds all positions of its own heads."""
    counted, subcaches = cache, {}
    if isinstance(cache, EncoderDecoderCache):
        counted = cache.self_attention_cache
        subcaches = {name: _class_of(getattr(cache, name)) for name in SUBCACHES}
    lengths = [int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else -1 for layer in counted.layers]
    batch = getattr(counted, "batch_size", -1) if counted.layers else -1
    flags = {name: getattr(counted, name) for name in _FLAGS if hasattr(counted, name)}
    return CacheInfo(*_class_of(cache), lengths, int(batch), flags, subcaches)


def _class_of(cache: Cache) -> tuple[str, str]:
    return type(cache).__module__, type(cache).__qualname__


_COUNTING = (DynamicLayer, Int8Layer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def shows_every_write(cache: Cache) -> bool:
    """Return whether no forward can write to the cache without its lengths telling. The states of linear attention
    and the cross-attention of an encoder-decoder change and have no length."""
    return not isinstance(cache, EncoderDecoderCache) and all(type(layer) in _COUNTING for layer in cache.layers)


CACHE_BLOCK = 1 << 16
"""Numbers that a request has for the caches it makes."""


class CacheTable:
    """The caches of one rank by number. The caller gives each request a block of numbers, so the ranks agree on them
    even after a request in which one rank made a cache and another raised. Caches that the caller made have negative
    numbers."""

    def __init__(self) -> None:
        self._held: dict[int, Cache] = {}
        self._ids: dict[int, int] = {}
        self.last_number = 0
        """A request begins with the number of its block."""

    def __len__(self) -> int:
        return len(self._held)

    def get(self, number: int, subcache: str = "") -> Cache:
        """Return a cache that is held, or one of its subcaches."""
        cache = self._held[number]
        return getattr(cache, subcache) if subcache else cache

    def info(self, number: int) -> CacheInfo:
        """Return the facts about a cache as it is now."""
        return info_of(self._held[number])

    def certain_info(self, number: int) -> CacheInfo | None:
        """Return the same; None if the cache may have been written to in a way that its lengths do not show."""
        return self.info(number) if shows_every_write(self._held[number]) else None

    def put(self, cache: Cache) -> int:
        """Return the id of `cache`, a new one on first sight."""
        number = self._ids.get(id(cache))
        if number is None:
            number = self.last_number = self.last_number + 1
            self._held[number] = cache
            self._ids[id(cache)] = number
        return number

    def adopt(self, number: int, cache: Cache) -> None:
        """Hold a cache that the caller made under the caller's number for it."""
        self._held[number] = cache
        self._ids[id(cache)] = number

    def free(self, numbers: Sequence[int]) -> None:
        """Let caches go. The number of a block stands for all caches of that request."""
        blocks = {number for number in numbers if number > 0 and number % CACHE_BLOCK == 0}
        made_then = [number for number in self._held if number > 0 and number - number % CACHE_BLOCK in blocks]
        for number in (*numbers, *made_then):
            cache = self._held.pop(number, None)
            if cache is not None:
                del self._ids[id(cache)]

    def handle(self, cache: Cache, known: Container[int] = ()) -> Handle:
        """Return the caller's handle for a cache.

        Args:
            cache: one that is held, or will be from now on.
            known: numbers of caches whose info reaches the caller anyway.
        """
        number, subcache = self._whole_of(cache)
        if not subcache:
            number = self.put(cache)
        info = None if number in known else info_of(self._held[number])
        return Handle("cache", {"id": number, "info": info, "subcache": subcache})

    def _whole_of(self, cache: Cache) -> tuple[int, str]:
        """Return number of the cache that this one is a subcache of, and which. (0, "") where it is none."""
        for number, kept in self._held.items():
            if isinstance(kept, EncoderDecoderCache):
                for name in SUBCACHES:
                    if getattr(kept, name) is cache:
                        return number, name
        return 0, ""

    def run(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], subcache: str = "") -> Any:
        """Call a method of a cache or subcache, or copy it. Returns what it returned, a handle for a new cache."""
        cache = self.get(number, subcache)
        result = copy.deepcopy(cache) if method == "copy" else getattr(cache, method)(*args, **kwargs)
        return self.handle(result) if isinstance(result, Cache) else result


def map_caches(value: Any, change: Callable[[Cache], Any]) -> Any:
    """`value` with every cache in it replaced; containers and model outputs keep their types."""
    return mapped(value, Cache, change, in_place=False)


def map_handles(value: Any, change: Callable[[Handle], Any]) -> Any:
    """Return the same for handles in a value that nobody else holds, so that its mappings may be changed in place."""
    return mapped(value, Handle, change, in_place=True)


def mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any], in_place: bool) -> Any:
    """`value` with all objects of a kind in it replaced.

    Args:
        in_place: nobody else holds the value, so its mappings may be changed; to copy a model output is slow.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, tuple) or type(value) is list:
        changed = [mapped(item, kind, change, in_place) for item in value]
        if all(new is old for new, old in zip(changed, value, strict=True)):
            return value
        return type(value)(*changed) if hasattr(value, "_fields") else type(value)(changed)
    if isinstance(value, dict):  # ModelOutput is one; it sets its attributes along with its items
        changes = {k: new for k, item in value.items() if (new := mapped(item, kind, change, in_place)) is not item}
        if not changes:
            return value
        altered = value if in_place else copy.copy(value)
        for key, new in changes.items():
            altered[key] = new  # not update(), which ModelOutput refuses
        return altered
    return value


PLAIN = (torch.Tensor, str, bytes, int, float, type(None))
"""Values that hold no others."""
