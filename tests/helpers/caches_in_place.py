"""Installs the cache methods that work in place in this process, and takes them away again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.cache_utils import DynamicCache, DynamicLayer

from parallelformers_ng.generation.in_place_cache import append_in_place

_METHODS = ((DynamicLayer, "update"), (DynamicLayer, "crop"), (DynamicCache, "crop"))


@contextlib.contextmanager
def caches_in_place() -> Iterator[None]:
    """Install the methods; at the end, restore those that the classes had themselves, and remove the others."""
    own = [(owner, name, vars(owner).get(name)) for owner, name in _METHODS]
    append_in_place()
    try:
        yield
    finally:
        for owner, name, method in own:
            if method is None:
                delattr(owner, name)
            else:
                setattr(owner, name, method)
