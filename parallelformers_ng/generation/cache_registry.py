"""Keeps track, in the caller's process, of the caches on the workers: numbers, handles, and caches to free."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from transformers.cache_utils import Cache

from parallelformers_ng.errors import DeadlineExpiredError, NotPortableError, ParallelError, SharedMemoryError
from parallelformers_ng.generation.cache_handle import CacheHandle, adopt, is_empty
from parallelformers_ng.generation.caches import CACHE_BLOCK, CacheInfo
from parallelformers_ng.runtime.supervisor import Supervisor
from parallelformers_ng.wire.frame import Handle

# Errors that are raised before the request reaches any rank, so that the ranks' caches are unchanged.
_NOTHING_SENT = (DeadlineExpiredError, NotPortableError, SharedMemoryError)


# Weak reference to a handle, with a key: the incarnation and the number of the handle's cache.
_Entry = weakref.KeyedRef[tuple[int, int], CacheHandle]


class CacheRegistry:
    """Tracks the KV caches of one model's workers. Has only a weak reference to the `Supervisor` of the workers."""

    def __init__(self, workers: Supervisor) -> None:
        self._workers = weakref.ref(workers)
        self._entries: dict[int, _Entry] = {}
        self.unwanted: deque[_Entry | tuple[int, int]] = deque()
        """Caches to free on the workers: entries of handles that no longer exist, and (incarnation, number) pairs."""
        self._numbers = itertools.count(-1, -1)  # caches that the caller created get negative numbers
        self.blocks = itertools.count(CACHE_BLOCK, CACHE_BLOCK)
        """First number of each request's block of numbers, so that all ranks give a new cache the same number."""

    @property
    def incarnation(self) -> int | None:
        """Number of restarts of the workers; None if the workers were stopped."""
        workers = self._workers()
        return None if workers is None else workers.incarnation

    def send(self, cache: Cache, in_flight: dict[int, Cache]) -> Handle:
        """Add a cache to `in_flight`, by number, and return the `Handle` that replaces the cache in a message.

        For a handle of a subcache, add the handle of the whole cache.
        """
        if isinstance(cache, CacheHandle):
            if cache.check() is not self:
                raise ParallelError(f"this {type(cache).__name__} belongs to another model")
            whole, subcache = cache.place()
            in_flight[whole.number] = whole
            return Handle("cache", (whole.number, subcache))
        if not is_empty(cache):
            raise ParallelError(
                f"this {type(cache).__name__} was filled outside the parallelized model; pass an empty cache, or a"
                " cache that this model returned"
            )
        number = next(self._numbers)
        in_flight[number] = cache
        return Handle("new cache", (number, cache))

    def refresh(self, cache: Cache | None, incarnation: int, number: int, info: CacheInfo) -> None:
        """Set the `info` of the caller's handle after a request; if `cache` is no handle yet, make it a handle.

        Args:
            cache: cache that `send` added to `in_flight`; None has no effect.
            incarnation: incarnation of the workers that ran the request.
        """
        if isinstance(cache, CacheHandle):
            cache.info = info
        elif cache is not None:
            self._enter(adopt(cache, self, incarnation, number, info))

    def receive(self, handle: Handle, incarnation: int) -> Any:
        """Return the caller's `CacheHandle` for a cache in a request's result; for `handle` see `CacheTable.handle`."""
        number, info, subcache = handle.payload["id"], handle.payload["info"], handle.payload["subcache"]
        entry = self._entries.get(number)
        known = None if entry is None else entry()
        if known is None:
            return self._enter(adopt(None, self, incarnation, number, info))
        known.info = info or known.info
        return getattr(known, subcache) if subcache else known

    def take_freed(self) -> list[int]:
        """Return the numbers of the caches that the next request must free on the workers."""
        present, freed = self.incarnation, []
        while self.unwanted:
            item = self.unwanted.popleft()
            incarnation, number = item.key if isinstance(item, weakref.KeyedRef) else item
            if self._entries.get(number) is item:
                del self._entries[number]
            if incarnation == present:
                freed.append(number)
        return freed

    def free_after_failure(
        self, incarnation: int, numbers: list[int], in_flight: Mapping[int, Cache] | None = None
    ) -> None:
        """Schedule caches to be freed on the workers after a failed request.

        Args:
            numbers: numbers of caches that the request should have freed, and of its block of new caches.
            in_flight: caches that were sent with the request. Handles become `unverified`; caches that the caller
                created are freed.
        """
        for number, cache in (in_flight or {}).items():
            if isinstance(cache, CacheHandle):
                cache.unverified = True
            else:
                self.unwanted.append((incarnation, number))
        self.unwanted.extend((incarnation, number) for number in numbers)

    def call(
        self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], subcache: str = ""
    ) -> Any:
        """Call a method of a cache, or of one of its subcaches, on every rank. The method "copy" copies the cache.

        If a method that may have changed the cache raises an error, the handle cannot be used any more.

        Returns:
            Result of the method on rank 0; a new handle for a result that is a cache.
        """
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        group, incarnation, deadline = workers.ready()
        handle.check()  # raises StaleCacheError if `ready` has just restarted the workers
        block = next(self.blocks)
        try:
            result, info = group.call(
                "caches.run", handle.number, method, args, kwargs, block, subcache, deadline=deadline, to_devices=True
            )
            handle.info = info
            return self.receive(result, incarnation) if isinstance(result, Handle) else result
        except BaseException as error:  # Ctrl-C included, after which the ranks' caches may differ
            reads = method in ("copy", "__getattribute__") or method.startswith("get_")
            handle.inconsistent = not (reads or isinstance(error, _NOTHING_SENT))
            self.free_after_failure(incarnation, [block])
            raise

    def is_unchanged(self, handle: CacheHandle) -> bool:
        """Whether the cache on every rank still matches the handle's `info`."""
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        group, incarnation, deadline = workers.ready()
        if incarnation != handle.incarnation:
            return False
        infos = group.call_each("caches.certain_info", [(handle.number,)], deadline)
        return all(info == handle.info for info in infos)

    def _enter(self, handle: CacheHandle) -> CacheHandle:
        key = handle.incarnation, handle.number
        # The callback is a C function (`deque.append`), because Ctrl-C in a Python callback would be lost.
        self._entries[handle.number] = weakref.KeyedRef(handle, self.unwanted.append, key)
        return handle
