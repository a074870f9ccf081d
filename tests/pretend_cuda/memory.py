"""Counts the memory of pretended devices like torch's caching allocator, and detects faults with freed memory.

Memory without tensors stays reserved until the cache is emptied. A graph's memory is freed only after each graph of its
pool was reset. A graph holds addresses and no tensors. Freed memory of a graph is filled with bits of one, which are
NaN. A replay that would read or write freed memory is a fault.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

_GIBIBYTE = 1 << 30


class Pool:
    """The memory shared by some graphs.

    Attributes:
        users: graphs captured with it and not reset, weakly referenced: a collected graph counts as reset.
        index: index of the device.
        storages: storages of the pool, with their bytes.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.storages: dict[int, int] = {}

    @property
    def bytes(self) -> int:
        return sum(self.storages.values())


class Memory:
    """The memory of tensors on each device.

    Attributes:
        limit: bytes of each device.
        faults: descriptions of faults with freed memory.
        pools: pools of graphs, by handle.
        pool: pool from which memory is taken now, during a capture.
        uncounted: storages that torch's allocator does not know.
        on_take, on_free: functions called with each storage that is allocated, and freed.
    """

    def __init__(self) -> None:
        self.limit = 8 * _GIBIBYTE
        self.faults: list[str] = []
        self.pools: dict[Any, Pool] = {}
        self.pool: Pool | None = None
        self.uncounted: set[int] = set()
        self.on_take: list[Callable[[int], None]] = []
        self.on_free: list[Callable[[int], None]] = []
        self._reserved: Counter[int] = Counter()
        self._tensors: dict[int, int] = {}  # storage → number of its tensors
        self._places: dict[int, tuple[int, int]] = {}  # storage → device and bytes
        self._allocated: Counter[int] = Counter()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._watchers: dict[int, weakref.WeakSet[Any]] = {}  # storage → recordings with its address
        self._lock = threading.RLock()

    def take(self, tensor: Any, host: torch.Tensor, index: int) -> None:
        """Count a new tensor of a device.

        Raises:
            OutOfMemoryError: the tensor needs new memory, and the device has too little free memory.
        """
        storage = host.untyped_storage()
        key = storage._cdata
        with self._lock:
            if key not in self._tensors:
                self._allocate(key, index, 0 if key in self.uncounted else storage.nbytes())
            self._tensors[key] = self._tensors.get(key, 0) + 1
            number = id(tensor)
            self._references[number] = weakref.ref(tensor, functools.partial(self._let_go, number, key))

    def is_live(self, key: int) -> bool:
        """Return whether a tensor uses a storage."""
        return key in self._tensors

    def watch(self, key: int, recording: Any) -> None:
        """Call the recording's `on_freed` when a storage with this address is freed."""
        self._watchers.setdefault(key, weakref.WeakSet()).add(recording)

    def allocated(self, index: int) -> int:
        """Return the bytes of the tensors on a device."""
        return self._allocated[index]

    def reserved(self, index: int) -> int:
        """Return the bytes that torch has reserved on a device."""
        self._reserved[index] = max(self._reserved[index], self._used(index))
        return self._reserved[index]

    def empty_cache(self, index: int) -> None:
        """Free memory that neither a tensor nor a graph needs."""
        for handle, pool in list(self.pools.items()):
            if not pool.users and pool is not self.pool and not any(map(self.is_live, pool.storages)):
                del self.pools[handle]
        self._reserved[index] = self._used(index)

    def _used(self, index: int) -> int:
        """Return the bytes that cannot be freed: live tensors, and pools. A pool without graphs counts only its live
        tensors."""
        used = self._allocated[index]
        for pool in self.pools.values():
            if pool.index == index and (pool.users or pool is self.pool):
                used += sum(count for key, count in pool.storages.items() if key not in self._tensors)
        return used

    def _allocate(self, key: int, index: int, count: int) -> None:
        if self._used(index) + count > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count / _GIBIBYTE:.2f} GiB.")
        if self.pool is not None:
            self.pool.storages[key] = count
        self._places[key] = index, count
        self._allocated[index] += count
        for told in self.on_take:
            told(key)

    def _let_go(self, number: int, key: int, _: object) -> None:
        with self._lock:
            del self._references[number]
            self._tensors[key] -= 1
            if self._tensors[key]:
                return
            index, count = self._places.pop(key)
            self.uncounted.discard(key)
            self.reserved(index)
            del self._tensors[key]
            self._allocated[index] -= count
            for pool in self.pools.values():
                if not pool.users:
                    pool.storages.pop(key, None)
            for recording in self._watchers.pop(key, ()):
                recording.on_freed(key)
            for told in self.on_free:
                told(key)

    def check(self, keys: Iterable[int], what: str) -> None:
        """Record a fault if a replay needs freed memory."""
        freed = [key for key in keys if key not in self._tensors]
        if freed:
            self.faults.append(f"{what} needs {len(freed)} tensors whose memory was freed")


def key_of(host: torch.Tensor) -> int:
    """Return the key of a host tensor's memory."""
    return host.untyped_storage()._cdata


def poison(host: torch.Tensor) -> None:
    """Fill the whole storage of a tensor with bits of one, which are NaN."""
    storage = host.untyped_storage()
    ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


def bytes_of(host: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor, as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(host.untyped_storage())


memory = Memory()
