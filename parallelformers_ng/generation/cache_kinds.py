"""Sets how a rank stores the keys and values of new caches: as tensors on the device, in int8, or in host memory."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.caches import parts_of
from parallelformers_ng.generation.int8_layer import Int8Layer
from parallelformers_ng.generation.wrapping import wrap_once
from parallelformers_ng.sharding.cache_names import CACHE

_kind: str | None = None


def keep_caches(kind: str | None) -> None:
    """Choose how each `DynamicCache` that this process creates from now on stores keys and values: "int8", "offload"
    (in host memory), or None for the usual way."""
    global _kind
    _kind = kind
    plain = getattr(DynamicCache.__init__, "__wrapped__", DynamicCache.__init__)
    DynamicCache.__init__ = plain if kind is None else _of_the_kind(plain)  # without a wrapper, `None` costs no time


def _of_the_kind(make: Any) -> Any:
    @functools.wraps(make)
    def init(cache: DynamicCache, *args: Any, **kwargs: Any) -> None:
        make(cache, *args, **kwargs, **({"offloading": True} if _kind == "offload" else {}))
        take_kind(cache)

    return init


def order_prefetches() -> None:
    """On CUDA, make `Cache.prefetch` wait until the same keys and values have been offloaded to host memory.

    transformers 5.17 does not order prefetches after offloads. The order matters: the host runs ahead of the device.
    """
    wrap_once(Cache, "prefetch", _after_offloads)


def _after_offloads(usual: Any) -> Any:
    def prefetch(cache: Cache, *args: Any, **kwargs: Any) -> Any:
        cache.prefetch_stream.wait_stream(torch.cuda.default_stream())
        return usual(cache, *args, **kwargs)

    return prefetch


def take_kind(cache: Cache) -> Cache:
    """Replace the empty `DynamicLayer`s of a cache by `Int8Layer`s, in place, if `keep_caches("int8")` was called."""
    for part in parts_of(cache) if _kind == "int8" else ():
        if isinstance(part, DynamicCache):
            if part.layer_class_to_replicate is DynamicLayer:
                part.layer_class_to_replicate = Int8Layer
            for place, layer in enumerate(part.layers):
                if type(layer) is DynamicLayer and not layer.is_initialized:
                    part.layers[place] = Int8Layer()
    return cache


def check_kind(kind: str | None, device: str, decode: Any) -> None:
    """Raise ParallelError if a kind of cache does not work on a device ("cpu" or "cuda"), or with `decode=`."""
    if kind is not None and decode not in ("auto", "eager"):
        raise ParallelError(
            f"fit: cache={kind!r} needs caches that grow, and decode={decode!r} has caches of a fixed size; leave out"
            " cache or decode"
        )
    if kind == "offload" and device == "cpu":
        raise ParallelError(
            "fit: cache='offload' moves keys and values to host memory, and CPU ranks already keep them there; leave"
            " cache out, or pass cache='int8'"
        )


def kind_for(model: PreTrainedModel, kind: str | None) -> str | None:
    """Return `kind` if a model's caches can have that kind; otherwise raise ParallelError."""
    if kind is None:
        return None
    name = type(model).__name__
    if CACHE not in inspect.signature(model.forward).parameters:
        raise ParallelError(f"fit: cache is {kind!r}, and {name} takes no cache of keys and values; leave cache out")
    if kind == "offload" and model.config.is_encoder_decoder:
        raise ParallelError(
            f"fit: cache='offload' does not bring back keys and values that no step changes, and {name} has such keys"
            " and values of its encoder; pass cache='int8'"
        )
    layers = DynamicCache(config=model.config).layers
    if layers and not any(type(layer) in (DynamicLayer, Int8Layer) for layer in layers):
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ParallelError(
            f"fit: cache={kind!r} needs cache layers with keys and values of all tokens, and the cache layers of {name}"
            f" are {kinds}; leave cache out"
        )
    return kind
