"""Table of a rank's KV caches: the caches stay on the worker, and the caller gets handles."""

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
    """Facts about a KV cache that its handle knows without a request to the workers.

    Attributes:
        module, name: module and name of the cache's class.
        lengths: number of tokens in each layer; -1 for a layer that does not count tokens.
        batch_size: number of sequences; -1 before the first update.
        flags: name → value of boolean or list-valued properties (`is_compileable`, `is_sliding`, …).
        subcaches: name of a subcache of an encoder-decoder cache → module and name of its class.
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
    # The info is the same on all ranks, because each rank has the keys and values of all tokens, for its heads.
    counted, subcaches = cache, {}
    if isinstance(cache, EncoderDecoderCache):
        counted = cache.self_attention_cache
        subcaches = {name: _class_of(getattr(cache, name)) for name in SUBCACHES}
    lengths = [int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else -1 for layer in counted.layers]
    batch = getattr(counted, "batch_size", -1) if counted.layers else -1
    flags = {name: getattr(counted, name) for name in _FLAGS if hasattr(counted, name)}
    return CacheInfo(*_class_of(cache), lengths, int(batch), flags, subcaches)


def parts_of(cache: Cache) -> list[Any]:
    """Return the two subcaches of an encoder-decoder cache; for any other cache, a list of the cache itself."""
    return [getattr(cache, name) for name in SUBCACHES] if isinstance(cache, EncoderDecoderCache) else [cache]


def _class_of(cache: Cache) -> tuple[str, str]:
    return type(cache).__module__, type(cache).__qualname__


_COUNTING = (DynamicLayer, Int8Layer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def shows_every_write(cache: Cache) -> bool:
    # A write to linear-attention states or to cross-attention keys and values does not change a length.
    return not isinstance(cache, EncoderDecoderCache) and all(type(layer) in _COUNTING for layer in cache.layers)


# Each request reserves a block of this many numbers for the caches that it creates.
CACHE_BLOCK = 1 << 16


class CacheTable:
    """The KV caches of one rank, by number.

    The caller reserves a block of numbers for the new caches of each request. So all ranks use the same numbers, even
    after an earlier request created a cache on only some ranks. Caches that the caller created have negative numbers.
    """

    def __init__(self) -> None:
        self._caches: dict[int, Cache] = {}
        self.last_number = 0
        """Number of the newest cache; set to the number of the block when a request begins."""

    def held(self) -> int:
        return len(self._caches)

    def get(self, number: int, subcache: str = "") -> Cache:
        cache = self._caches[number]
        return getattr(cache, subcache) if subcache else cache

    def info(self, number: int) -> CacheInfo:
        return info_of(self._caches[number])

    def certain_info(self, number: int) -> CacheInfo | None:
        """Return the info of a cache, or None if a write to the cache may leave the lengths in the info unchanged."""
        return self.info(number) if shows_every_write(self._caches[number]) else None

    def adopt(self, number: int, cache: Cache) -> None:
        self._caches[number] = cache

    def free(self, numbers: Sequence[int]) -> None:
        """Remove caches. The first number of a block removes all caches that the request with this block created."""
        blocks = {number for number in numbers if number > 0 and number % CACHE_BLOCK == 0}
        numbers_in_blocks = [
            number for number in self._caches if number > 0 and number - number % CACHE_BLOCK in blocks
        ]
        for number in (*numbers, *numbers_in_blocks):
            self._caches.pop(number, None)

    def handle(self, cache: Cache, known: Container[int] = ()) -> Handle:
        """Return the `Handle` that replaces a cache in a result for the caller. If `known` contains the number, the
        caller has the info already, and the `Handle` has none."""
        number, subcache = self._place_of(cache)
        info = None if number in known else info_of(self._caches[number])
        return Handle("cache", {"id": number, "info": info, "subcache": subcache})

    def _place_of(self, cache: Cache) -> tuple[int, str]:
        """Return the number of a cache and "", or for a subcache the number of its whole cache and its name. A cache
        without a number gets the next number."""
        for number, kept in self._caches.items():
            if kept is cache:
                return number, ""
            for name in SUBCACHES if isinstance(kept, EncoderDecoderCache) else ():
                if getattr(kept, name) is cache:
                    return number, name
        self.last_number += 1
        self._caches[self.last_number] = cache
        return self.last_number, ""

    def run(
        self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], block: int, subcache: str = ""
    ) -> tuple[Any, CacheInfo]:
        """Call a method of a cache, or of its subcache, for the caller's handle. The method "copy" copies the cache.

        Args:
            block: first number of the request's block; a new cache gets the next number.

        Returns:
            Result of the method, with a `Handle` instead of a cache; and the new info of the whole cache.
        """
        self.last_number = block
        cache = self.get(number, subcache)
        with torch.inference_mode():
            result = copy.deepcopy(cache) if method == "copy" else getattr(cache, method)(*args, **kwargs)
        return self.handle(result) if isinstance(result, Cache) else result, self.info(number)


def map_caches(value: Any, change: Callable[[Cache], Any]) -> Any:
    return mapped(value, Cache, change, in_place=False)


def map_handles(value: Any, change: Callable[[Handle], Any]) -> Any:
    return mapped(value, Handle, change, in_place=True)


def mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any], in_place: bool) -> Any:
    """Replace each object of the class `kind` in a value by `change(object)`, also inside containers and outputs.

    Args:
        in_place: whether to change dicts in place, which saves copies; only for a value that nothing else uses.
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
    if isinstance(value, dict):  # a ModelOutput is a dict, too
        changes = {k: new for k, item in value.items() if (new := mapped(item, kind, change, in_place)) is not item}
        if not changes:
            return value
        altered = value if in_place else copy.copy(value)
        for key, new in changes.items():
            altered[key] = new  # `update` raises an error for a ModelOutput
        return altered
    return value


# Classes whose objects contain no other objects.
PLAIN = (torch.Tensor, str, bytes, int, float, type(None))
