"""How a rank keeps the keys and values of the caches that a model makes: as they are, in int8, or in host memory."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.caches import SUBCACHES
from parallelformers_ng.generation.int8_layer import Int8Layer
from parallelformers_ng.sharding.cache_names import CACHE

_kind: str | None = None


def keep_caches(kind: str | None) -> None:
    """From now on every dynamic cache that this process makes is of a kind; None is what transformers makes of it."""
    global _kind
    _kind = kind
    plain = getattr(DynamicCache.__init__, "__wrapped__", DynamicCache.__init__)
    DynamicCache.__init__ = (
        plain if kind is None else _of_the_kind(plain)
    )  # the next model's caches are none the slower


def _of_the_kind(make: Any) -> Any:
    @functools.wraps(make)
    def init(cache: DynamicCache, *args: Any, **kwargs: Any) -> None:
        make(cache, *args, **kwargs, **({"offloading": True} if _kind == "offload" else {}))
        take_kind(cache)

    return init


def order_prefetches() -> None:
    """Have caches in host memory bring keys and values back no sooner than they have left, from now on. For CUDA
    ranks: transformers 5.17 does not wait for prefetches, and the host no longer waits in each step."""
    if not hasattr(Cache.prefetch, "__wrapped__"):
        Cache.prefetch = _after_offloads(Cache.prefetch)


def _after_offloads(usual: Any) -> Any:
    @functools.wraps(usual)
    def prefetch(cache: Cache, *args: Any, **kwargs: Any) -> Any:
        cache.prefetch_stream.wait_stream(torch.cuda.default_stream())
        return usual(cache, *args, **kwargs)

    return prefetch


def take_kind(cache: Cache) -> Cache:
    """Give an empty cache, maybe the caller's, the kind in which caches are kept. It is changed, and returned."""
    for part in _parts(cache) if _kind == "int8" else ():
        if part.layer_class_to_replicate is DynamicLayer:
            part.layer_class_to_replicate = Int8Layer
        part.layers[:] = [Int8Layer() if _is_plain(layer) else layer for layer in part.layers]
    return cache


def _parts(cache: Cache) -> Iterator[DynamicCache]:
    """Yield the dynamic caches that a cache is or has."""
    caches = [getattr(cache, name) for name in SUBCACHES] if isinstance(cache, EncoderDecoderCache) else [cache]
    return (part for part in caches if isinstance(part, DynamicCache))


def _is_plain(layer: Any) -> bool:
    return type(layer) is DynamicLayer and not layer.is_initialized


def check_kind(kind: str | None, device: str, decode: Any) -> None:
    """See that ranks on a device, "cpu" or "cuda", can keep caches so with that `decode=` of `parallelize`.

    Raises:
        ParallelError: they cannot; it says why.
    """
    if kind is not None and decode not in ("auto", "eager"):
        raise ParallelError(
            f"fit: cache={kind!r} is for caches that grow, and decode={decode!r} has caches of a fixed size; leave one"
            " of them out"
        )
    if kind == "offload" and device == "cpu":
        raise ParallelError(
            "fit: cache='offload' keeps keys and values in host memory, where those of CPU ranks are; leave it out, or"
            " take cache='int8'"
        )


def kind_for(model: PreTrainedModel, kind: str | None) -> str | None:
    """Return `kind` if a model's caches can be kept so.

    Raises:
        ParallelError: they cannot; it says why.
    """
    if kind is None:
        return None
    name = type(model).__name__
    if CACHE not in inspect.signature(model.forward).parameters:
        raise ParallelError(f"fit: cache is {kind!r}, and {name} takes no cache of keys and values; leave it out")
    if kind == "offload" and model.config.is_encoder_decoder:
        raise ParallelError(
            f"fit: cache='offload' brings back the keys and values that a layer adds to, and {name} only reads those of"
            " its encoder; take cache='int8'"
        )
    layers = DynamicCache(config=model.config).layers
    if layers and not any(type(layer) in (DynamicLayer, Int8Layer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ParallelError(
            f"fit: cache={kind!r} is for layers that keep keys and values of all tokens, and those of {name} are"
            f" {kinds}; leave it out"
        )
    return kind
