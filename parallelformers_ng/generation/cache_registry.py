"""The caller's side of the caches that live in the workers: their numbers, their handles, what is to be freed."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from transformers.cache_utils import Cache

from parallelformers_ng.errors import DeadlineExpiredError, NotPortableError, ParallelError, SharedMemoryError
from parallelformers_ng.generation.cache_handle import CacheHandle, adopt, is_empty
from parallelformers_ng.generation.caches import CACHE_BLOCK, CacheInfo
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.wire.frame import Handle

_NOTHING_SENT = (DeadlineExpiredError, NotPortableError, SharedMemoryError)
"""Errors of requests of which no rank has heard."""


class Workers(Protocol):
    """The holder of a group of workers, which replaces a group that died."""

    @property
    def incarnation(self) -> int:
        """How often the workers were started again."""

    def ready(self, deadline: float | None) -> tuple[WorkerGroup, int]:
        """Return the group to send requests to, and its incarnation."""

    def deadline_of(self, timeout: float | None) -> float:
        """When a call must be done that begins now, on the clock of `time.monotonic`."""


class _Entry(weakref.ref[CacheHandle]):
    """A handle, as long as it lasts, and where its cache is."""

    __slots__ = ("incarnation", "number")

    incarnation: int
    number: int


class CacheRegistry:
    """The caches of one model's workers.

    Args:
        workers: whose caches these are. It does not keep them.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = weakref.ref(workers)
        self._entries: dict[int, _Entry] = {}
        self.unwanted: deque[_Entry | tuple[int, int]] = deque()
        """Caches that nobody holds any more: entries whose handles are gone, incarnations and numbers."""
        self._numbers = itertools.count(-1, -1)  # of caches that the caller made; the workers' are positive
        self.blocks = itertools.count(CACHE_BLOCK, CACHE_BLOCK)
        """Numbers for the caches that one request makes, the same on every rank whatever became of other requests."""

    @property
    def incarnation(self) -> int | None:
        """How often the workers were started again; None if they are gone for good."""
        workers = self._workers()
        return None if workers is None else workers.incarnation

    # -- with requests -------------------------------------------------------------------------------------------

    def send(self, cache: Cache, in_flight: dict[int, Cache]) -> Handle:
        """Return the value that stands for a cache in a message; note the cache in `in_flight` by its number.

        Raises:
            ParallelError: it is another model's, or was filled in this process.
        """
        if isinstance(cache, CacheHandle):
            if cache.check() is not self:
                raise ParallelError(f"this {type(cache).__name__} belongs to another model")
            whole, subcache = cache.place()
            in_flight[whole.number] = whole
            return Handle("cache", (whole.number, subcache))
        if not is_empty(cache):
            raise ParallelError(
                f"this {type(cache).__name__} was filled outside the parallelized model, whose workers hold their own"
                " heads; pass an empty cache, or one that this model returned"
            )
        number = next(self._numbers)
        in_flight[number] = cache
        return Handle("new cache", (number, cache))

    def refresh(self, cache: Cache | None, incarnation: int, number: int, info: CacheInfo) -> None:
        """Note what became of a cache that was sent; one of the caller's own becomes a handle."""
        if isinstance(cache, CacheHandle):
            cache.info = info
        elif cache is not None:
            self._enter(adopt(cache, self, incarnation, number, info))

    def receive(self, handle: Handle, incarnation: int) -> Any:
        """Return the caller's handle for a cache that a request returned."""
        number, info, subcache = handle.payload["id"], handle.payload["info"], handle.payload["subcache"]
        entry = self._entries.get(number)
        known = None if entry is None else entry()
        if known is None:
            return self._enter(adopt(None, self, incarnation, number, info))
        known.info = info or known.info
        return getattr(known, subcache) if subcache else known

    def take_freed(self) -> list[int]:
        """Return numbers to free with the request that is about to be sent."""
        present, freed = self.incarnation, []
        while self.unwanted:
            item = self.unwanted.popleft()
            if isinstance(item, _Entry):
                if self._entries.get(item.number) is item:
                    del self._entries[item.number]
                item = item.incarnation, item.number
            incarnation, number = item
            if incarnation == present:
                freed.append(number)
        return freed

    def free_after_failure(
        self, incarnation: int, numbers: list[int], in_flight: Mapping[int, Cache] | None = None
    ) -> None:
        """Free the caches that a failed request should have freed, or has made.

        Args:
            incarnation: incarnation of the request's workers.
            numbers: numbers of caches and blocks.
            in_flight: caches that went with the request, by number. Handles among them are verified with the ranks
                before their next use; the caller's own empty caches are dropped on the ranks.
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
        """Call a method of a cache, or of one of its subcaches, on every rank."""
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        deadline = workers.deadline_of(None)
        group, incarnation = workers.ready(deadline)
        handle.check()  # after the group was chosen: of an older one, it is stale
        block = next(self.blocks)
        try:
            result, info = group.call(
                "cache", handle.number, method, args, kwargs, block, subcache, deadline=deadline, to_devices=True
            )
            handle.info = info
            if isinstance(result, Handle):
                number, info = result.payload["id"], result.payload["info"]
                return self._enter(adopt(None, self, incarnation, number, info))
            return result
        except BaseException as error:  # an interrupt may come as late as here
            reads = method in ("copy", "__getattribute__") or method.startswith("get_")
            handle.inconsistent = not (reads or isinstance(error, _NOTHING_SENT))
            self.free_after_failure(incarnation, [block])
            raise

    def is_unchanged(self, handle: CacheHandle) -> bool:
        """Return whether every rank still holds the cache as it was when the caller last heard of it."""
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        deadline = workers.deadline_of(None)
        group, incarnation = workers.ready(deadline)
        if incarnation != handle.incarnation:
            return False
        numbers = [(handle.number,)] * group.world_size
        infos = group.call_each("cache_info", numbers, deadline)
        return all(info == handle.info for info in infos)

    def _enter(self, handle: CacheHandle) -> CacheHandle:
        # What is called when a handle goes is no Python code: Ctrl-C would strike in it, and be lost.
        entry = self._entries[handle.number] = _Entry(handle, self.unwanted.append)
        entry.incarnation, entry.number = handle.incarnation, handle.number
        return handle
