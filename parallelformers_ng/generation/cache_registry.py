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

# Errors that are raised before a request reaches any rank.
_NOTHING_SENT = (DeadlineExpiredError, NotPortableError, SharedMemoryError)


# Weak reference to a handle; its key is the incarnation and the number of the handle's cache.
_Entry = weakref.KeyedRef[tuple[int, int], CacheHandle]


class CacheRegistry:
    """The caches on the workers of one model. The registry keeps only a weak reference to the owner of the workers."""

    def __init__(self, workers: Supervisor) -> None:
        self._workers = weakref.ref(workers)
        self._entries: dict[int, _Entry] = {}
        self.unwanted: deque[_Entry | tuple[int, int]] = deque()
        """Caches to free on the workers: entries of handles that no longer exist, and (incarnation, number) pairs."""
        self._numbers = itertools.count(-1, -1)  # for caches that the caller made
        self.blocks = itertools.count(CACHE_BLOCK, CACHE_BLOCK)
        """First number of each request's block of numbers, so that all ranks give a new cache the same number."""

    @property
    def incarnation(self) -> int | None:
        """Number of restarts of the workers; None if the workers were stopped."""
        workers = self._workers()
        return None if workers is None else workers.incarnation

    # -- with requests -------------------------------------------------------------------------------------------

    def send(self, cache: Cache, in_flight: dict[int, Cache]) -> Handle:
        """Return the value that stands for a cache in a message, and add the cache to `in_flight` by its number.

        A subcache's handle adds the handle of the whole cache.
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
        """Store new facts about a cache that was sent with a request; a cache that the caller made becomes a handle.

        Args:
            cache: cache from `in_flight` of `send`; None has no effect.
            incarnation: incarnation of the workers that ran the request.
        """
        if isinstance(cache, CacheHandle):
            cache.info = info
        elif cache is not None:
            self._enter(adopt(cache, self, incarnation, number, info))

    def receive(self, handle: Handle, incarnation: int) -> Any:
        """Return the caller's handle for a cache that a request returned; see `CacheTable.handle`."""
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
        """After a failed request, free the caches that the request made, and the caches that the request had to free.

        Args:
            numbers: numbers of caches and of blocks to free.
            in_flight: caches of the request. A handle is compared with the ranks' caches before its next use. A cache
                that the caller made is freed on the ranks.
        """
        for number, cache in (in_flight or {}).items():
            if isinstance(cache, CacheHandle):
                cache.unverified = True
            else:
                self.unwanted.append((incarnation, number))
        self.unwanted.extend((incarnation, number) for number in numbers)

    # -- for handles ---------------------------------------------------------------------------------------------

    def call(
        self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], subcache: str = ""
    ) -> Any:
        """Call a method of a cache, or of one of its subcaches, on every rank; "copy" copies the cache.

        After an error of a method that may have changed the cache, the handle cannot be used any more.

        Returns:
            Result of the method on rank 0; a new handle for a result that is a cache.
        """
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        group, incarnation, deadline = workers.ready()
        handle.check()  # a handle of an older group is stale
        block = next(self.blocks)
        try:
            result, info = group.call(
                "caches.run", handle.number, method, args, kwargs, block, subcache, deadline=deadline, to_devices=True
            )
            handle.info = info
            return self.receive(result, incarnation) if isinstance(result, Handle) else result
        except BaseException as error:  # an interrupt may come as late as here
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
        # The callback of the weak reference is a C function: in a Python callback, Ctrl-C would be lost.
        key = handle.incarnation, handle.number
        self._entries[handle.number] = weakref.KeyedRef(handle, self.unwanted.append, key)
        return handle
