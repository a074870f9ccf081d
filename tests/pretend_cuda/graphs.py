"""CUDA graphs on pretended devices: the operators of a step, run again on the memory that they had.

Written after `CUDAGraph.cpp`, `graphs.py` and `CUDACachingAllocator.cpp` of torch: see `contract.py`. A capture
computes nothing, so that what it wrote is as it was afterwards. A graph keeps the memory of its pool and no other. What
graphs of one pool leave in it may be overwritten by any of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.pretend_cuda.memory import Pool, bytes_of, key_of, memory, poison
from tests.pretend_cuda.streams import order

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing\nSearch for it"
_INVALIDATED = "CUDA error: operation failed due to a previous error during capture"
_handles = itertools.count(1)


class Recording:
    """The record of a capture.

    Attributes:
        groups: process groups of NCCL whose collectives are in it.
        is_valid: whether nothing was done that a capture does not permit.
    """

    def __init__(self) -> None:
        self.groups: set[Any] = set()
        self.is_valid = True
        self._steps: list[Callable[[], None]] = []
        self._made: dict[int, torch.Tensor] = {}
        self._outside: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}
        self._written: set[int] = set()
        self._last: torch.Tensor | None = None

    def operator(self, func: Any, args: Any, kwargs: Any, compute: Callable[[Any, Any], Any]) -> Any:
        """Note an operator on tensors of the host, and what it makes.

        Args:
            compute: runs it.
        """
        args, kwargs = tree_map_only(torch.Tensor, self._address, (args, kwargs))
        given = {key_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        writes = False
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                writes = True
                written = args[place] if place < len(args) else kwargs[argument.name]
                self._remember(written)
        output = compute(args, kwargs)
        leaves = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(output)]
        fresh = [None if leaf is None or key_of(leaf) in given else leaf for leaf in leaves]
        for leaf in fresh:
            if leaf is not None:
                self._made[key_of(leaf)] = self._last = leaf

        def again() -> None:
            for old, new in zip(fresh, tree_leaves(compute(args, kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)

        if writes or not leaves or any(leaf is not None for leaf in fresh):  # not for a view
            self._steps.append(again)
        return output

    def collective(self, group: Any, hosts: list[torch.Tensor], run: Callable[[], None]) -> None:
        """Note an exchange of a group, which runs when the graph does."""
        for host in hosts:
            self._address(host)
        self.groups.add(group)
        self._steps.append(run)

    def finish(self, pool: Pool) -> None:
        """The capture has ended: what it wrote was never written."""
        self.undo()
        for key, tensor in self._made.items():
            pool.storages[key] = tensor.untyped_storage().nbytes()
        for key in self._outside:
            memory.watch(key, self)

    def leave(self, pool: Pool) -> None:
        """Leave of a pool what tensors lie in."""
        for key in self._made:
            if not memory.is_live(key):
                pool.storages.pop(key, None)

    def undo(self) -> None:
        for key, held in self._before.items():
            self._outside[key].copy_(held)
        self._before.clear()

    def run(self) -> None:
        memory.check(self._outside, "a replay")
        order.queued(self._outside, self._written, "a replay")
        for step in self._steps:
            step()

    def overwrite(self) -> None:
        """Another graph of the pool has run."""
        for tensor in self._made.values():
            poison(tensor)

    def on_freed(self, key: int) -> None:
        """Memory was freed of which this has the address: others may write there."""
        poison(self._outside[key])

    def spoil(self) -> None:
        """Have the last operator give something else."""
        assert self._last is not None
        self._last.mul_(2)

    def _address(self, host: torch.Tensor) -> torch.Tensor:
        key = key_of(host)
        if key not in self._made:
            if not memory.is_live(key):
                return host.clone()  # a number of the host is a constant of the graph
            self._outside.setdefault(key, bytes_of(host))
        return host

    def _remember(self, written: torch.Tensor) -> None:
        key = key_of(written)
        if key in self._outside and key not in self._written:
            self._written.add(key)
            self._before[key] = self._outside[key].clone()


class CUDAGraph:
    """A graph.

    Attributes:
        recordings, replays: how many there were in this process.
        fault: "refused" where nothing can be captured, "wrong" where a graph gives something else.
    """

    recordings = 0
    replays = 0
    fault = ""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._pool: Pool | None = None

    def has_collectives_of(self, group: Any) -> bool:
        """Whether NCCL keeps something of a group for this graph."""
        return self.recording is not None and group in self.recording.groups

    def replay(self) -> None:
        if self.recording is None or self._pool is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        CUDAGraph.replays += 1
        for other in self._pool.users:
            if other is not self and other.recording is not None:
                other.recording.overwrite()
        self.recording.run()
        if CUDAGraph.fault == "wrong":
            self.recording.spoil()

    def reset(self) -> None:
        recording, pool, self.recording, self._pool = self.recording, self._pool, None, None
        if recording is not None and pool is not None:
            pool.users.discard(self)
            recording.leave(pool)

    __del__ = reset

    def _captured(self, recording: Recording, pool: Pool) -> None:
        self.recording, self._pool = recording, pool
        pool.users.add(self)
        for group in recording.groups:
            group.graphs.add(self)


capturing: Recording | None = None
"""What captures now in this process."""


@contextlib.contextmanager
def capture(graph: CUDAGraph, handle: Any, index: int) -> Iterator[None]:
    """Capture what runs within it. The cache was emptied before.

    Raises:
        RuntimeError: the pool has tensors, and all its graphs were reset; or something was not permitted.
    """
    global capturing
    assert capturing is None, "one capture at a time"
    if graph.recording is not None:
        raise RuntimeError(
            "This CUDAGraph instance already owns a captured graph. To capture a new graph, create another"
        )
    pool = memory.pools.setdefault(handle, Pool(index))
    if pool.storages and not pool.users:
        raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp")
    recording = capturing = Recording()
    memory.pool = pool
    try:
        yield
        if CUDAGraph.fault == "refused":
            recording.is_valid = False
            raise RuntimeError(NOT_PERMITTED)
    finally:
        capturing = memory.pool = None
        if not recording.is_valid:
            recording.undo()
            raise RuntimeError(_INVALIDATED)
        recording.finish(pool)
        graph._captured(recording, pool)
    CUDAGraph.recordings += 1


def refuse() -> None:
    """Refuse an operation during a capture, which it makes invalid.

    Raises:
        RuntimeError: something is captured.
    """
    if capturing is not None:
        capturing.is_valid = False
        raise RuntimeError(NOT_PERMITTED)


def pool_handle() -> tuple[int, int]:
    return 0, next(_handles)
