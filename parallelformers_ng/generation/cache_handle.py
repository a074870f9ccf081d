"""The caller's end of a cache that lives in the workers."""

from __future__ import annotations

import functools
import importlib
import weakref
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache

from parallelformers_ng.errors import ParallelError, StaleCacheError
from parallelformers_ng.generation.caches import SUBCACHES, CacheInfo


class Registry(Protocol):
    """The registry of a handle: it knows the workers that hold the cache, and asks them."""

    @property
    def incarnation(self) -> int | None:
        """How often the workers were started again; None if they are gone for good."""

    def is_unchanged(self, handle: CacheHandle) -> bool:
        """Return whether every rank still holds the cache as it was when the caller last heard of it."""

    def call(
        self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], subcache: str = ""
    ) -> Any:
        """Call a method of a cache, or of one of its subcaches, on every rank."""


class CacheHandle(Cache):
    """Stands for a cache of the workers. It is also an instance of that cache's class.

    Lengths and properties are answered here; what changes or reads the contents (`crop`, `reorder_cache`, `reset`, a
    copy) runs on the workers. When the handle goes, so does the cache. After a restart of the workers it is gone, and
    every use of the handle raises `StaleCacheError`. So it does after a request that failed while it was writing to the
    cache, since each rank may then hold another length.
    """

    number: int
    incarnation: int
    info: CacheInfo
    unverified = False
    """A request that had it failed; the ranks are asked before the next use."""
    inconsistent = False
    """Ranks may hold different lengths of it."""
    _registry: weakref.ref[Registry]

    def check(self) -> Registry:
        """Return the registry that it is entered in.

        Raises:
            StaleCacheError: the workers that held the cache are gone, or their parts of it differ.
        """
        registry = self._registry()
        if registry is None or registry.incarnation != self.incarnation:
            raise StaleCacheError(
                f"this {type(self).__name__} was held by workers that are gone (restarted or stopped);"
                " run the prompt again"
            )
        if self.unverified:
            self.inconsistent = not registry.is_unchanged(self)
            self.unverified = False
        if self.inconsistent:
            raise StaleCacheError(
                f"a request failed or was interrupted while it wrote to this {type(self).__name__}, so the ranks may"
                " hold different lengths of it; run the prompt again"
            )
        return registry

    def place(self) -> tuple[CacheHandle, str]:
        """Return the handle that has a number of the workers', and which of its subcaches this is, "" for the whole."""
        return self, ""

    def _remote(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.check().call(self, method, args, kwargs)

    @property
    def layers(self) -> Any:
        raise ParallelError(
            f"the tensors of this {type(self).__name__} are with the workers, each holding its own heads;"
            " get_seq_length, crop, reorder_cache, batch_select_indices, batch_repeat_interleave, reset and copy"
            " work on it as a whole"
        )

    def update(self, *_: Any, **__: Any) -> Any:
        raise ParallelError(
            f"this {type(self).__name__} is with the workers of a parallelized model, and a model in this process"
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
        raise ParallelError(f"a {type(self).__name__} cannot be pickled: its tensors are with the workers")

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


class EncoderDecoderCacheHandle(CacheHandle, EncoderDecoderCache):
    """A handle for an encoder-decoder cache. Its subcaches have handles of their own, which last as long as it does."""

    @property
    def is_updated(self) -> dict[int, bool]:
        """Whether each layer's cross-attention is filled."""
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
    """A handle for one subcache of an encoder-decoder cache. It has no state but that of the whole, which changes with
    it; two handles of one subcache are equal."""

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
        # The whole counts its self-attention; of the cross-attention the workers are asked.
        return replace(info, lengths=[-1] * len(info.lengths), flags={})

    def check(self) -> Registry:
        return self._whole.check()

    def _remote(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.check().call(self._whole, method, args, kwargs, self._name)

    @property
    def batch_size(self) -> int:
        if self._name == "self_attention_cache":
            return self._whole.batch_size
        return self._remote("__getattribute__", "batch_size")


def adopt(cache: Cache | None, registry: Registry, incarnation: int, number: int, info: CacheInfo) -> CacheHandle:
    """Return a handle for cache `number` of the workers of `incarnation`. If the caller already holds an object for
    it, that object becomes the handle."""
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
    """Return a class that is both a `CacheHandle` and a `cls`, with every public method of `cls` answered or
    forwarded."""
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
            members[name] = _flag(name)
        elif callable(attribute):
            members[name] = _forwarded(name, attribute)
    return type(cls.__name__, bases, members)


def _flag(name: str) -> property:
    def read(self: CacheHandle) -> Any:
        self.check()
        if name in self.info.flags:
            return self.info.flags[name]
        return self._remote("__getattribute__", name)

    return property(read)


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
    """Return whether a cache that the caller made holds nothing yet, so that the workers can fill it."""
    parts = [getattr(cache, name) for name in SUBCACHES] if isinstance(cache, EncoderDecoderCache) else [cache]
    return not any(_is_filled(layer) for part in parts for layer in part.layers)


def _is_filled(layer: Any) -> bool:
    """Return whether a layer has its tensors, `[batch, …]` with two or three more dimensions, from a first update.
    Counters may be there before."""
    return any(isinstance(value, torch.Tensor) and value.ndim >= 3 for value in vars(layer).values())
