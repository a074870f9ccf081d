"""What stands behind a parallelized model: its plan, its worker group and the memory that holds its shards."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.nodes import Assembled, Leaf, Node
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.source import Checkpoint
from parallelformers_ng.checkpoint.store import ShardSource, ShardStore, hand_over, take_back
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.errors import GroupClosedError, GroupError
from parallelformers_ng.generation.handle import CacheHandle, adopt
from parallelformers_ng.memory import RankMemory
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.leaves import FileDescriptor, Handle
from parallelformers_ng.sharding.plan import Shard, ShardPlan, TensorPlan

log = logging.getLogger("parallelformers_ng")

REPLICA = "parallelformers_ng.runtime.replica:Replica"
_BATCH_BYTES = 256 << 20  # weights loaded with one request, so that a progress bar moves


@dataclass(frozen=True)
class RestartLimit:
    """How many restarts within how many seconds are an accident; one more is a storm, and the group stays down."""

    count: int = 3
    seconds: float = 60.0


class Deployment:
    """Owns the workers of one model and the weights they map.

    A group whose worker died is not mended: all ranks live and die together, and a new group maps the same memory.

    Args:
        model: the model, weights loaded. After `start` its tensors are on `meta`.
        plan: how it is cut.
        make_group: starts a group for the plan's world size; None where `group` is given.
        group: a group that is running already, to be used and left running; it is not replaced when it dies.
        keep_weights: keep the memory that the weights were handed over in. On CPU it is the shards themselves; on CUDA
            it is a copy in host memory, without which a dead group cannot be replaced.
        restart: whether a dead group is replaced.
        limit: when to give up replacing it.
        checkpoint: where the tensors lie that the model does not hold: the workers read them out of these files, and
            again after a restart.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        make_group: Callable[[], WorkerGroup] | None,
        *,
        group: WorkerGroup | None = None,
        keep_weights: bool = True,
        restart: bool = True,
        limit: RestartLimit | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.plan = plan
        self._checkpoint = checkpoint or Checkpoint({})
        keep_weights = keep_weights or checkpoint is not None  # what is not in the files is little
        self._make_group = make_group
        self._keeps_weights = keep_weights
        self._restart = restart and group is None and keep_weights
        self._borrowed = group is not None
        self._limit = limit or RestartLimit()
        self._restarts: deque[float] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self.incarnation = 0
        self._caches: weakref.WeakValueDictionary[int, CacheHandle] = weakref.WeakValueDictionary()
        self._freed: deque[tuple[int, int]] = deque()
        self._cache_numbers = itertools.count(-1, -1)  # the workers count upwards for the caches that they make
        self._skeleton = Skeleton.of(model, plan)
        self._group = group if group is not None else self._start_group()
        self._store: ShardStore | None = None

    def start(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Build the ranks, then hand the weights over. On failure the model has its weights again.

        Everything that can fail without weights fails before the first byte is given up.
        """
        try:
            self._group.call("build", self._skeleton)
            store = self._store = ShardStore(self._checkpoint.in_memory(self.plan))
            hand_over(model, store, progress)
            try:
                self._attach(store, progress)
            except BaseException:
                take_back(model, store.plan, store)
                raise
        except BaseException:
            self.close()
            raise
        if not self._keeps_weights:
            self._release_store()

    def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of the replicas and return rank 0's answer. `options` are those of `WorkerGroup.call`.

        A request that a dying worker interrupted is not run again: the caller is told, and decides.
        """
        return self._living_group().call(method, *args, **options)

    @property
    def device_names(self) -> list[str]:
        return self._group.device_names

    @property
    def pids(self) -> list[int]:
        return self._group.pids

    # -- caches that live in the workers; see generation.handle ---------------------------------------------------

    def cache_call(self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a cache on every rank."""
        result, facts = self.call("cache", handle._number, method, args, kwargs)
        handle._facts = facts
        if isinstance(result, Handle):
            return self.remember_cache(adopt(None, self, result.payload["id"], result.payload["facts"]))
        return result

    def next_cache_number(self) -> int:
        """An id for a cache that the caller made; negative, so that it is none of the workers'."""
        return next(self._cache_numbers)

    def remember_cache(self, handle: CacheHandle) -> CacheHandle:
        self._caches[handle._number] = handle
        return handle

    def known_cache(self, number: int) -> CacheHandle | None:
        return self._caches.get(number)

    def free_cache(self, incarnation: int, number: int) -> None:
        """Called when a handle is gone, possibly by the garbage collector: only note it, the next call tells the
        ranks."""
        self._freed.append((incarnation, number))

    def take_freed(self) -> list[int]:
        """Ids to free with the request that is about to be sent."""
        freed = []
        while self._freed:
            incarnation, number = self._freed.popleft()
            if incarnation == self.incarnation:
                freed.append(number)
        return freed

    def memory(self) -> list[RankMemory]:
        """A report of each rank."""
        group = self._living_group()
        return group.call_each("memory", [()] * group.world_size)

    def read(self, name: str) -> torch.Tensor:
        """One parameter or buffer, whole, on CPU."""
        return self._source().read(self.plan.tensors[name])

    def node(self, name: str) -> Node:
        """One parameter or buffer, to be read in parts from wherever it lies."""
        tensor = self.plan.tensors[name]
        if name in self._checkpoint.nodes:
            return self._checkpoint.nodes[name]
        tensor = self.plan.tensors[tensor.storage]
        return (
            self._store.node(tensor) if self._store is not None else WorkerShards(self.plan, self._group).node(tensor)
        )

    def save(self, directory: Path, names: list[str], limit: int) -> list[list[WrittenFile]]:
        """Every rank writes its files of a sharded directory. Returns what each wrote."""
        group = self._living_group()
        return group.call_each("save", [(str(directory), names, limit)] * group.world_size)

    def gather(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Put the weights back into the model, on CPU, and stop the workers."""
        with self._lock:
            if self._store is not None:
                self._leave_group()  # first, so that memory can be given back as it is read
            take_back(model, self.plan, self._source(), progress=progress)
            self._leave_group()
            self._release_store()

    def close(self) -> None:
        """Stop the workers and let the weights go. Idempotent."""
        with self._lock:
            self._leave_group()
            self._release_store()

    def _source(self) -> ShardSource:
        held = self._store if self._store is not None else WorkerShards(self.plan, self._group)
        return FilesAnd(self._checkpoint, held)

    def _release_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _leave_group(self) -> None:
        if self._borrowed and not self._closed and self._group.alive:
            self._group.call("drop")
        elif not self._borrowed:
            self._group.close()
        self._closed = True

    def _living_group(self) -> WorkerGroup:
        if self._group.alive or not self._restart:
            return self._group
        with self._lock:
            if self._closed:
                raise GroupClosedError("the model is no longer parallelized: its workers were stopped")
            if not self._group.alive:
                self._replace_group()
        return self._group

    def _replace_group(self) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > self._limit.seconds:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit.count:
            raise GroupError(
                f"the workers died {len(self._restarts) + 1} times within {self._limit.seconds:.0f} s; not starting"
                " them again. model.deparallelize() gives the weights back"
            )
        self._restarts.append(now)
        self._group.close()
        self._group = self._start_group()
        self.incarnation += 1
        self._caches.clear()
        assert self._store is not None, "a group is replaced only where the weights are kept"
        try:
            self._group.call("build", self._skeleton)
            self._attach(self._store)
        except BaseException:
            self._group.close()  # it has no weights, so nobody may call it
            raise
        log.warning("workers restarted in %.1f s", time.monotonic() - now)

    def _start_group(self) -> WorkerGroup:
        assert self._make_group is not None, "a borrowed group is never replaced"
        return self._make_group()

    def _attach(self, store: ShardStore, progress: Progress | None = None) -> None:
        ranks = range(self.plan.world_size)
        fds = [tuple(FileDescriptor(fd) for fd in store.fds_for(rank)) for rank in ranks]
        nodes = self._checkpoint.to_bytes()
        self._group.call_each("attach", [(*pair, nodes) for pair in fds])
        for names, size in self._batches():
            self._group.call("load", names)
            if progress is not None:
                progress(size)
        self._group.call("loaded")

    def _batches(self) -> Iterator[tuple[list[str], int]]:
        """Tensors to load with one request each, so that progress shows, and their bytes."""
        names: list[str] = []
        size = 0
        for tensor in self.plan.stored():
            if tensor.name in self._checkpoint.nodes:
                names.append(tensor.name)
                size += tensor.bytes_whole
                if size >= _BATCH_BYTES:
                    yield names, size
                    names, size = [], 0
        if names:
            yield names, size


class FilesAnd:
    """Reads what a checkpoint holds from its files, and the rest from where the deployment keeps it."""

    def __init__(self, checkpoint: Checkpoint, rest: ShardSource) -> None:
        self._checkpoint = checkpoint
        self._rest = rest

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        in_files = tensor.storage in self._checkpoint.nodes
        return self._checkpoint.read(tensor) if in_files else self._rest.read(tensor, release)


class WorkerShards:
    """Reads tensors back from the ranks themselves: on CUDA the devices hold the only copy."""

    def __init__(self, plan: ShardPlan, group: WorkerGroup) -> None:
        self._plan = plan
        self._group = group

    def read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for shard, part in zip(tensor.shards, self.parts(tensor), strict=True):
            shard.put(part, whole)
        return whole

    def parts(self, tensor: TensorPlan) -> list[torch.Tensor]:
        """Every rank's part."""
        exported = self._group.call_each("export", [([tensor.storage],)] * self._plan.world_size)
        return [part for (part,) in exported]

    def node(self, tensor: TensorPlan) -> Node:
        """The same tensor to be read piece by piece; the parts are fetched once while the node lives."""
        fetched: list[torch.Tensor] = []
        ranks = [0] if tensor.is_replicated else [rank for rank, shard in enumerate(tensor.shards) if not shard.zero]
        parts: dict[int, tuple[Shard, Node]] = {}
        for rank in ranks:
            shape = tensor.shards[rank].shape(tensor.shape)
            parts[rank] = tensor.shards[rank], _WorkerLeaf(shape, tensor.dtype, self, tensor, rank, fetched)
        return Assembled(tensor.shape, tensor.dtype, parts)


@dataclass(eq=False)
class _WorkerLeaf(Leaf):
    shards: WorkerShards = field(repr=False)
    plan: TensorPlan
    rank: int
    fetched: list[torch.Tensor] = field(repr=False)

    def tensor(self) -> torch.Tensor:
        if not self.fetched:
            self.fetched += self.shards.parts(self.plan)
        return self.fetched[self.rank]

    def release(self) -> None:
        self.fetched.clear()
