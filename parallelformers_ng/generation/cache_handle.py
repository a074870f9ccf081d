"""Handles: objects in the caller's process that represent KV caches on the workers."""

from __future__ import annotations

import functools
import importlib
import weakref
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from parallelformers_ng.errors import ParallelError, StaleCacheError
from parallelformers_ng.generation.caches import CacheInfo, parts_of
from parallelformers_ng.live_code.object_graph import children_of, walk
from parallelformers_ng.origins import is_library


class CacheHandle(Cache):
    """Represents, in the caller's process, a KV cache on the workers. Also an instance of the cache's own class.

    The handle itself knows lengths and properties. Methods that read or change the contents (`crop`, `reorder_cache`,
    `reset`, copies) run on the workers. Reading `layers`, calling `update` and pickling raise `ParallelError`, because
    the tensors are on the workers. The workers free the cache when the handle is garbage-collected. A use of the handle
    raises `StaleCacheError` after a restart of the workers. The same error is raised after a failed write to the cache
    if the ranks' caches then have different lengths.

    Attributes:
        incarnation: restart count of the workers that have the cache.
        info: facts about the cache after the latest request.
    """

    number: int
    incarnation: int
    info: CacheInfo
    # Whether a request with this cache has failed. If so, `check` compares the ranks' caches before the next use.
    unverified = False
    # Whether the ranks' caches may have different lengths, so that the handle cannot be used any more.
    inconsistent = False
    _registry: weakref.ref[Any]  # a `CacheRegistry`; `Any`, because its module imports this module

    def check(self) -> Any:
        """Return the handle's registry. Raise StaleCacheError if the cache is lost, or may differ between ranks."""
        registry = self._registry()
        if registry is None or registry.incarnation != self.incarnation:
            raise StaleCacheError(
                f"this {type(self).__name__} was lost when its workers restarted or stopped; run the prompt again"
            )
        if self.unverified:
            self.inconsistent = not registry.is_unchanged(self)
            self.unverified = False
        if self.inconsistent:
            raise StaleCacheError(
                f"a request failed or was interrupted while it wrote to this {type(self).__name__}, so its length may"
                " differ between ranks; run the prompt again"
            )
        return registry

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of a cache of the user's own class; called for names that the handle does not have."""
        if name.startswith("_") or name in _OWN or is_library(type(self).__module__):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = self._remote("__getattribute__", name)
        if any(isinstance(part, torch.Tensor) for part in walk([value], children_of)):
            raise ParallelError(f"{name} of this {type(self).__name__} has tensors, and each worker has its own")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or is_library(type(self).__module__):
            object.__setattr__(self, name, value)
        else:
            self._remote("__setattr__", name, value)

    def place(self) -> tuple[CacheHandle, str]:
        """Return the handle of the whole cache and "", or for a subcache the handle of its whole cache and its name."""
        return self, ""

    def _remote(self, method: str, *args: Any, **kwargs: Any) -> Any:
        whole, subcache = self.place()
        return self.check().call(whole, method, args, kwargs, subcache)

    @property
    def layers(self) -> Any:
        raise ParallelError(
            f"the tensors of this {type(self).__name__} are on the workers, each of which has some of the heads;"
            " use get_seq_length, crop, reorder_cache, batch_select_indices, batch_repeat_interleave, reset or copy"
        )

    def update(self, *_: Any, **__: Any) -> Any:
        raise ParallelError(
            f"this {type(self).__name__} is on the workers of a parallelized model, and a model in this process"
            " cannot write to it; pass it to the model that returned it, or run the prompt again"
        )

    def __len__(self) -> int:
        return len(self.info.lengths)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(on the workers, layers={len(self)}, tokens={max([0, *self.info.lengths])})"

    def __copy__(self) -> Any:
        return self._remote("copy")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._remote("copy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParallelError(f"a {type(self).__name__} cannot be pickled: its tensors are on the workers")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.check()
        counted = [length for length in self.info.lengths if length >= 0]
        if not counted:
            return self._remote("get_seq_length", layer_idx) if self.info.lengths else 0
        if layer_idx >= len(self.info.lengths):
            return 0
        length = self.info.lengths[layer_idx]
        return counted[0] if length < 0 and layer_idx == 0 else length

    @property
    def batch_size(self) -> int:
        return self.info.batch_size


_OWN = {*CacheHandle.__annotations__, "unverified", "inconsistent", "_whole", "_name", "__class__"}


class EncoderDecoderCacheHandle(CacheHandle, EncoderDecoderCache):
    """A handle for an encoder-decoder cache. Each of the two subcaches has its own handle."""

    @property
    def is_updated(self) -> dict[int, bool]:
        """Layer index → whether the cross-attention cache of that layer is filled. Each access sends a request."""
        return self._remote("__getattribute__", "is_updated")

    @property
    def self_attention_cache(self) -> Any:
        return self._subcache("self_attention_cache")

    @property
    def cross_attention_cache(self) -> Any:
        return self._subcache("cross_attention_cache")

    def _subcache(self, name: str) -> SubcacheHandle:
        cls: Any = handle_class(_named_class(*self.info.subcaches[name]), SubcacheHandle)  # type: ignore[arg-type]
        subcache = cls.__new__(cls)
        subcache._whole, subcache._name = self, name
        return subcache


class SubcacheHandle(CacheHandle):
    """A handle for one subcache of an encoder-decoder cache. Handles of the same subcache are equal."""

    _whole: EncoderDecoderCacheHandle
    _name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubcacheHandle) and (self._whole, self._name) == (other._whole, other._name)

    def __hash__(self) -> int:
        return hash((id(self._whole), self._name))

    def place(self) -> tuple[CacheHandle, str]:
        return self._whole, self._name

    @property
    def info(self) -> CacheInfo:  # type: ignore[override]
        info = self._whole.info
        if self._name == "self_attention_cache":
            return info
        # `_whole.info` has the lengths of the self-attention cache. A length of -1 makes `get_seq_length` ask the
        # workers.
        return replace(info, lengths=[-1] * len(info.lengths), flags={})

    def check(self) -> Any:
        return self._whole.check()

    @property
    def batch_size(self) -> int:
        if self._name == "self_attention_cache":
            return self._whole.batch_size
        return self._remote("__getattribute__", "batch_size")


def adopt(cache: Cache | None, registry: Any, incarnation: int, number: int, info: CacheInfo) -> CacheHandle:
    """Make a handle for a cache on the workers. The caller's object `cache`, if there is one, becomes the handle."""
    cls = handle_class(_named_class(info.module, info.name) if cache is None else type(cache))  # type: ignore[arg-type]
    if cache is None:
        handle = cls.__new__(cls)
    else:
        handle = cache
        cache.__dict__.clear()
        cache.__class__ = cls
    handle.number, handle.incarnation, handle.info = number, incarnation, info
    handle._registry = weakref.ref(registry)
    return handle


@functools.cache
def handle_class(cls: type[Cache], base: type[CacheHandle] = CacheHandle) -> type[CacheHandle]:
    """Create a subclass of `CacheHandle` and `cls`. Its public methods run on the workers or read the handle's `info`.

    Args:
        cls: class of the cache on the workers; a handle class is returned unchanged.
        base: class of the handle; for an encoder-decoder cache, always `EncoderDecoderCacheHandle`.
    """
    if issubclass(cls, CacheHandle):
        return cls
    base = EncoderDecoderCacheHandle if issubclass(cls, EncoderDecoderCache) else base
    bases = (base,) if base.__mro__[1:] and cls in base.__mro__ else (base, cls)
    members: dict[str, Any] = {"__module__": cls.__module__}
    for name in dir(cls):
        own = any(name in vars(parent) for parent in base.__mro__ if parent.__module__ == __name__)
        if own or name.startswith("_"):
            continue
        attribute = getattr(cls, name)
        if isinstance(attribute, property):
            members[name] = property(functools.partial(_flag, name=name))
        elif callable(attribute):
            members[name] = _forwarded(name, attribute)
    return type(cls.__name__, bases, members)


def _flag(handle: CacheHandle, name: str) -> Any:
    handle.check()
    return handle.info.flags[name] if name in handle.info.flags else handle._remote("__getattribute__", name)


def _forwarded(name: str, original: Any) -> Any:
    @functools.wraps(original)
    def call(self: CacheHandle, *args: Any, **kwargs: Any) -> Any:
        return self._remote(name, *args, **kwargs)

    return call


def _named_class(module: str, name: str) -> type[Cache]:
    cls = getattr(importlib.import_module(module), name)
    assert issubclass(cls, Cache), f"{cls} is no cache"
    return cls


def is_empty(cache: Cache) -> bool:
    """Whether the caller's cache has no keys and values yet, so that the workers can fill it."""
    return not any(_is_filled(layer) for part in parts_of(cache) for layer in part.layers)


def _is_filled(layer: Any) -> bool:
    # Keys, values and recurrent states have 3 or more dimensions. Counters, which empty layers also have, have fewer.
    return any(isinstance(value, torch.Tensor) and value.ndim >= 3 for value in vars(layer).values())
