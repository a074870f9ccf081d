"""Pretends CUDA graphs: the operators of a step are recorded, and run again on the same memory.

The rules follow `CUDAGraph.cpp`, `graphs.py` and `CUDACachingAllocator.cpp` of torch: see `contract.py`. A capture
computes nothing, so the memory it writes is unchanged afterwards. A graph keeps only the memory of its pool. Each graph
of a pool may overwrite memory of another graph of the pool.
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
    """The operators and collectives of a capture.

    Attributes:
        groups: process groups of NCCL whose collectives are in the recording.
        is_valid: whether the capture had only permitted operations.
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
        self._cost = 0

    def operator(self, func: Any, args: Any, kwargs: Any, compute: Callable[[Any, Any], Any]) -> Any:
        """Record an operator on host tensors, and the tensors that the operator makes.

        Args:
            func: the operator.
            args, kwargs: its arguments.
            compute: function that runs it.
        """
        args, kwargs = tree_map_only(torch.Tensor, self._address, (args, kwargs))
        arguments = {key_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        writes = False
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else kwargs.get(argument.name)
                if written is not None:  # an optional argument
                    writes = True
                    self._remember(written)
        output = compute(args, kwargs)
        leaves = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in tree_leaves(output)]
        fresh = [None if leaf is None or key_of(leaf) in arguments else leaf for leaf in leaves]
        for leaf in fresh:
            if leaf is not None:
                self._made[key_of(leaf)] = self._last = leaf

        def again() -> None:
            for old, new in zip(fresh, tree_leaves(compute(args, kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)

        if writes or not leaves or any(leaf is not None for leaf in fresh):  # a view needs no step
            self._steps.append(again)
            self._cost += order.kernel_cost if func.namespace == "parallelformers_ng" else 1
        return output

    def collective(self, group: Any, hosts: list[torch.Tensor], run: Callable[[], None]) -> None:
        """Record an exchange of a group; each replay of the graph runs the exchange again."""
        for host in hosts:
            self._address(host)
        self.groups.add(group)
        self._steps.append(run)

    def finish(self, pool: Pool) -> None:
        """End the capture and undo its writes."""
        self.undo()
        for key, tensor in self._made.items():
            pool.storages[key] = tensor.untyped_storage().nbytes()
        for key in self._outside:
            memory.watch(key, self)

    def leave(self, pool: Pool) -> None:
        """Remove from the pool the memory without live tensors."""
        for key in self._made:
            if not memory.is_live(key):
                pool.storages.pop(key, None)

    def undo(self) -> None:
        for key, contents in self._before.items():
            self._outside[key].copy_(contents)
        self._before.clear()

    def run(self) -> None:
        memory.check(self._outside, "a replay")
        order.queued(self._outside, self._written, "a replay")
        order.replayed += self._cost
        for step in self._steps:
            step()

    def overwrite(self) -> None:
        """Fill the recording's memory after another graph of the pool has run."""
        for tensor in self._made.values():
            poison(tensor)

    def on_freed(self, key: int) -> None:
        """Fill freed memory that this recording addresses, because other tensors may write to it."""
        poison(self._outside[key])

    def spoil(self) -> None:
        """Change the result of the last operator."""
        assert self._last is not None
        self._last.mul_(2)

    def _address(self, host: torch.Tensor) -> torch.Tensor:
        key = key_of(host)
        if key not in self._made:
            if not memory.is_live(key):
                return host.clone()  # a host number is a constant of the graph
            self._outside.setdefault(key, bytes_of(host))
        return host

    def _remember(self, written: torch.Tensor) -> None:
        key = key_of(written)
        if key in self._outside and key not in self._written:
            self._written.add(key)
            self._before[key] = self._outside[key].clone()


class CUDAGraph:
    """A CUDA graph.

    Attributes:
        recordings, replays: numbers of captures and replays in this process.
        fault: "refused" if nothing can be captured, "wrong" if replays give wrong results.
    """

    recordings = 0
    replays = 0
    fault = ""

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self._pool: Pool | None = None

    def has_collectives_of(self, group: Any) -> bool:
        """Return whether NCCL keeps state of a group for this graph."""
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
"""Recording of the capture that runs in this process, if any."""


@contextlib.contextmanager
def capture(graph: CUDAGraph, handle: Any, index: int) -> Iterator[None]:
    """Capture the operators of the block. The caller has emptied the cache.

    Raises:
        RuntimeError: the pool has tensors, and all its graphs were reset; or an operation was not permitted.
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
    """Invalidate a running capture, for operations that no capture permits.

    Raises:
        RuntimeError: a capture is running.
    """
    if capturing is not None:
        capturing.is_valid = False
        raise RuntimeError(NOT_PERMITTED)


def pool_handle() -> tuple[int, int]:
    return 0, next(_handles)
