"""The caller's side of the caches that live in the workers: their numbers, their handles, what is to be freed."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from transformers.cache_utils import Cache

from parallelformers_ng.errors import ParallelError
from parallelformers_ng.generation.caches import CACHE_BLOCK, CacheFacts
from parallelformers_ng.generation.handle import CacheHandle, adopt, is_empty
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.wire.format import Handle
from parallelformers_ng.wire.interrupts import CriticalSection


class Workers(Protocol):
    """Whoever sends requests to a group that is replaced when it dies, and its caches with it."""

    @property
    def incarnation(self) -> int:
        """How often the workers were started again."""

    def ready(self, deadline: float) -> tuple[WorkerGroup, int]:
        """The group to send requests to and its incarnation; see `Supervisor.ready`."""

    def deadline_of(self, timeout: float | None) -> float:
        """When a call must be done that begins now, on the clock of `time.monotonic`."""


class _Entry(weakref.ref[CacheHandle]):
    """A handle, as long as it lasts, and where its cache is."""

    __slots__ = ("incarnation", "number")

    incarnation: int
    number: int


class CacheBook:
    """The caches of one model's workers.

    Args:
        workers: whose caches these are. The book does not keep them.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = weakref.ref(workers)
        self._entries: dict[int, _Entry] = {}
        self._gone: deque[_Entry] = deque()  # entries whose handles are gone
        self._freed: deque[tuple[int, int]] = deque()
        self._numbers = itertools.count(-1, -1)  # of caches that the caller made; the workers' are positive
        self._blocks = itertools.count(CACHE_BLOCK, CACHE_BLOCK)  # of those that a request makes

    @property
    def workers(self) -> Workers | None:
        """Whose caches these are; None where they are gone."""
        return self._workers()

    # -- with requests -------------------------------------------------------------------------------------------

    def send(self, cache: Cache, sent: dict[int, Cache]) -> Handle:
        """What goes to the workers for a cache, which is noted in `sent` by its number.

        Raises:
            ParallelError: it is another model's, or was filled in this process.
        """
        if isinstance(cache, CacheHandle):
            if cache.check() is not self:
                raise ParallelError(f"this {type(cache).__name__} belongs to another model")
            whole, half = cache.place()
            sent[whole.number] = whole
            return Handle("cache", (whole.number, half))
        if not is_empty(cache):
            raise ParallelError(
                f"this {type(cache).__name__} was filled outside the parallelized model, whose workers hold their own"
                " heads; pass an empty cache, or one that this model returned"
            )
        number = next(self._numbers)
        sent[number] = cache
        return Handle("new cache", (number, cache))

    def refresh(self, cache: Cache | None, incarnation: int, number: int, facts: CacheFacts) -> None:
        """Note what became of a cache that was sent; one of the caller's own becomes a handle."""
        if isinstance(cache, CacheHandle):
            cache.facts = facts
        elif cache is not None:
            self._enter(adopt(cache, self, incarnation, number, facts))

    def receive(self, handle: Handle, incarnation: int) -> Any:
        """The caller's handle for a cache that a request returned."""
        number, facts, half = handle.payload["id"], handle.payload["facts"], handle.payload["half"]
        entry = self._entries.get(number)
        known = None if entry is None else entry()
        if known is None:
            return self._enter(adopt(None, self, incarnation, number, facts))
        known.facts = facts or known.facts
        return getattr(known, half) if half else known

    def new_block(self) -> int:
        """Numbers for the caches that one request makes, the same on every rank whatever became of other requests."""
        return next(self._blocks)

    def take_freed(self) -> list[int]:
        """Numbers to free with the request that is about to be sent."""
        while self._gone:
            entry = self._gone.popleft()
            if self._entries.get(entry.number) is entry:
                del self._entries[entry.number]
            self._freed.append((entry.incarnation, entry.number))
        workers, freed = self._workers(), []
        while self._freed:
            incarnation, number = self._freed.popleft()
            if workers is not None and incarnation == workers.incarnation:
                freed.append(number)
        return freed

    def free_after_failure(self, incarnation: int, numbers: list[int], sent: Mapping[int, Cache] | None = None) -> None:
        """What a failed request should have freed, or made and nobody will ever hold.

        Args:
            incarnation: of the workers that the request was for.
            numbers: of caches and blocks.
            sent: caches that went with the request, by number. Handles among them are used no more before the ranks
                were asked; of the caller's own empty ones, what the ranks may have begun to fill is dropped.
        """
        for number, cache in (sent or {}).items():
            if isinstance(cache, CacheHandle):
                cache.doubtful = True
            else:
                self._freed.append((incarnation, number))
        self._freed.extend((incarnation, number) for number in numbers)

    # -- for handles ---------------------------------------------------------------------------------------------

    def call(
        self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], half: str = ""
    ) -> Any:
        """Call a method of a cache, or of one of its halves, on every rank."""
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        deadline = workers.deadline_of(None)
        group, incarnation = workers.ready(deadline)
        handle.check()  # after the group was chosen: of an older one, it is stale
        block = self.new_block()
        timeout = deadline - time.monotonic()
        with CriticalSection():
            try:
                result, facts = group.call("cache", handle.number, method, args, kwargs, block, half, timeout=timeout)
            except BaseException:
                handle.torn = not (method in ("copy", "__getattribute__") or method.startswith("get_"))
                self.free_after_failure(incarnation, [block])
                raise
            handle.facts = facts
            if isinstance(result, Handle):
                number, facts = result.payload["id"], result.payload["facts"]
                return self._enter(adopt(None, self, incarnation, number, facts))
            return result

    def is_untouched(self, handle: CacheHandle) -> bool:
        """Whether every rank still holds the cache as it was when the caller last heard of it."""
        workers = self._workers()
        assert workers is not None, "the handle was checked"
        deadline = workers.deadline_of(None)
        group, incarnation = workers.ready(deadline)
        if incarnation != handle.incarnation:
            return False
        numbers = [(handle.number,)] * group.world_size
        held = group.call_each("cache_facts", numbers, timeout=deadline - time.monotonic())
        return all(facts == handle.facts for facts in held)

    def _enter(self, handle: CacheHandle) -> CacheHandle:
        # What is called when a handle goes is no Python code: Ctrl-C would strike in it, and be lost.
        entry = self._entries[handle.number] = _Entry(handle, self._gone.append)
        entry.incarnation, entry.number = handle.incarnation, handle.number
        return handle
