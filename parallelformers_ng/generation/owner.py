"""The caller's side of the caches that live in the workers: their numbers, their handles, what is to be freed."""

from __future__ import annotations

import itertools
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any

from transformers.cache_utils import Cache

from parallelformers_ng.generation.caches import CACHE_BLOCK
from parallelformers_ng.generation.handle import CacheHandle, adopt
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.interrupts import Held
from parallelformers_ng.runtime.leaves import Handle


class _Place(weakref.ref[CacheHandle]):
    """A handle, as long as it lasts, and where its cache is."""

    __slots__ = ("incarnation", "number")

    incarnation: int
    number: int


class CacheOwner(ABC):
    """Whoever sends requests to a group that is replaced when it dies, and its caches with it."""

    def __init__(self) -> None:
        self._caches: dict[int, _Place] = {}
        self._gone: deque[_Place] = deque()  # places whose handles are gone
        self._freed: deque[tuple[int, int]] = deque()
        self._cache_numbers = itertools.count(-1, -1)  # of caches that the caller made
        self._cache_blocks = itertools.count(CACHE_BLOCK, CACHE_BLOCK)  # of those that a request makes

    @property
    @abstractmethod
    def incarnation(self) -> int:
        """How often the workers were started again."""

    @abstractmethod
    def ready(self, deadline: float) -> tuple[WorkerGroup, int]:
        """The group to send requests to and its incarnation; see `Supervisor.ready`."""

    @abstractmethod
    def deadline_of(self, timeout: float | None) -> float:
        """When a call must be done that begins now, on the clock of `time.monotonic`."""

    def cache_call(
        self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], half: str = ""
    ) -> Any:
        """Call a method of a cache, or of one of its halves, on every rank."""
        deadline = self.deadline_of(None)
        group, incarnation = self.ready(deadline)
        handle.check()  # after the group was chosen: of an older one, it is stale
        block = self.new_cache_block()
        timeout = deadline - time.monotonic()
        with Held():
            try:
                result, facts = group.call("cache", handle._number, method, args, kwargs, block, half, timeout=timeout)
            except BaseException:
                handle._torn = not (method in ("copy", "__getattribute__") or method.startswith("get_"))
                self.free_after_failure(incarnation, [block])
                raise
            handle._facts = facts
            if isinstance(result, Handle):
                number, facts = result.payload["id"], result.payload["facts"]
                return self.remember_cache(adopt(None, self, incarnation, number, facts))
            return result

    def is_untouched(self, handle: CacheHandle) -> bool:
        """Whether every rank still holds the cache as it was when the caller last heard of it."""
        deadline = self.deadline_of(None)
        group, incarnation = self.ready(deadline)
        if incarnation != handle._incarnation:
            return False
        numbers = [(handle._number,)] * group.world_size
        held = group.call_each("cache_facts", numbers, timeout=deadline - time.monotonic())
        return all(facts == handle._facts for facts in held)

    def new_cache_block(self) -> int:
        """Numbers for the caches that one request makes, the same on every rank whatever became of other requests."""
        return next(self._cache_blocks)

    def next_cache_number(self) -> int:
        """An id for a cache that the caller made; negative, so that it is none of the workers'."""
        return next(self._cache_numbers)

    def remember_cache(self, handle: CacheHandle) -> CacheHandle:
        # What is called when a handle goes is no Python code: Ctrl-C would strike in it, and be lost.
        place = self._caches[handle._number] = _Place(handle, self._gone.append)
        place.incarnation, place.number = handle._incarnation, handle._number
        return handle

    def known_cache(self, number: int) -> CacheHandle | None:
        place = self._caches.get(number)
        return None if place is None else place()

    def take_freed(self) -> list[int]:
        """Ids to free with the request that is about to be sent."""
        while self._gone:
            place = self._gone.popleft()
            if self._caches.get(place.number) is place:
                del self._caches[place.number]
            self._freed.append((place.incarnation, place.number))
        freed = []
        while self._freed:
            incarnation, number = self._freed.popleft()
            if incarnation == self.incarnation:
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
                cache._doubtful = True
            else:
                self._freed.append((incarnation, number))
        self._freed.extend((incarnation, number) for number in numbers)
