"""What stands behind a parallelized model: its plan, its worker group and the memory that holds its shards."""

from __future__ import annotations

import functools
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.nodes import Node
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.source import Checkpoint
from parallelformers_ng.checkpoint.store import ShardSource, ShardStore, hand_over, take_back
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.errors import PlacementError, SharedMemoryError
from parallelformers_ng.generation.caches import CACHE_BLOCK
from parallelformers_ng.generation.handle import CacheHandle, adopt
from parallelformers_ng.memory import RankMemory
from parallelformers_ng.runtime.deadline import deadline_of
from parallelformers_ng.runtime.frames import OUT_OF_MEMORY
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.leaves import FileDescriptor, Handle
from parallelformers_ng.runtime.supervisor import RestartLimit, Supervisor
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.worker_shards import FilesAnd, WorkerShards

REPLICA = "parallelformers_ng.runtime.replica:Replica"
_BATCH_BYTES = 256 << 20  # weights loaded with one request, so that a progress bar moves


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
        self._limit = limit
        self._lock = threading.Lock()
        self._closed = False
        self._caches: weakref.WeakValueDictionary[int, CacheHandle] = weakref.WeakValueDictionary()
        self._freed: deque[tuple[int, int]] = deque()
        self._cache_numbers = itertools.count(-1, -1)  # of caches that the caller made
        self._cache_blocks = itertools.count(CACHE_BLOCK, CACHE_BLOCK)  # of those that a request makes
        self._skeleton = Skeleton.of(model, plan)
        serving = group if group is not None else self._start_group()
        if serving.in_use:
            raise PlacementError("the group given serves another model; end that one first, or start another group")
        serving.in_use = True
        self._supervisor = Supervisor(serving)
        self._store: ShardStore | None = None

    def start(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Build the ranks, then hand the weights over. On failure the model has its weights again.

        Everything that can fail without weights fails before the first byte is given up.

        Raises:
            SharedMemoryError: the system has no memory for the shards.
        """
        group = self._supervisor.group
        try:
            group.call("build", self._skeleton)
            store = self._store = ShardStore(self._checkpoint.in_memory(self.plan))
            hand_over(model, store, progress)
            try:
                _attach(group, self.plan, store, self._checkpoint, progress)
                if self._restart and self._make_group is not None:
                    revive = functools.partial(
                        _revive, self._make_group, self._skeleton, self.plan, store, self._checkpoint
                    )
                    self._supervisor = Supervisor(group, revive, self._limit)
            except BaseException:
                take_back(model, store.plan, store)
                raise
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and error.errno in OUT_OF_MEMORY:
                needed = sum(self.plan.bytes_per_rank)
                raise SharedMemoryError(
                    f"no memory for {needed} bytes of shards: {error.strerror}; the model is as it was. Raise the"
                    " memory limit, or pass dtype= for smaller weights"
                ) from error
            raise
        if not self._keeps_weights:
            self._release_store()

    def ready(self, deadline: float) -> tuple[WorkerGroup, int]:
        """The group to send requests to and its incarnation; see `Supervisor.ready`."""
        return self._supervisor.ready(deadline)

    def deadline_of(self, timeout: float | None) -> float:
        """When a call must be done that begins now, on the clock of `time.monotonic`."""
        return deadline_of(self._supervisor.group.timeout if timeout is None else timeout)

    @property
    def incarnation(self) -> int:
        """How often the workers were started again."""
        return self._supervisor.incarnation

    @property
    def device_names(self) -> list[str]:
        return self._supervisor.group.device_names

    @property
    def pids(self) -> list[int]:
        return self._supervisor.group.pids

    # -- caches that live in the workers; see generation.handle ---------------------------------------------------

    def cache_call(self, handle: CacheHandle, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of a cache on every rank."""
        deadline = self.deadline_of(None)
        group, incarnation = self.ready(deadline)
        handle.check()  # after the group was chosen: of an older one, it is stale
        block = self.new_cache_block()
        timeout = deadline - time.monotonic()
        result, facts = group.call("cache", handle._number, method, args, kwargs, block, timeout=timeout)
        handle._facts = facts
        if isinstance(result, Handle):
            number, facts = result.payload["id"], result.payload["facts"]
            return self.remember_cache(adopt(None, self, incarnation, number, facts))
        return result

    def new_cache_block(self) -> int:
        """Numbers for the caches that one request makes, the same on every rank whatever became of other requests."""
        return next(self._cache_blocks)

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

    def free_after_failure(self, incarnation: int, numbers: list[int]) -> None:
        """What a failed request should have freed, or made and nobody will ever hold."""
        self._freed.extend((incarnation, number) for number in numbers)

    def memory(self) -> list[RankMemory]:
        """A report of each rank."""
        deadline = self.deadline_of(None)
        group, _ = self.ready(deadline)
        return group.call_each("memory", [()] * group.world_size, timeout=deadline - time.monotonic())

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
            self._store.node(tensor)
            if self._store is not None
            else WorkerShards(self.plan, self._supervisor.group).node(tensor)
        )

    def save(self, directory: Path, names: list[str], limit: int) -> list[list[WrittenFile]]:
        """Every rank writes its files of a sharded directory. Returns what each wrote."""
        group, _ = self.ready(self.deadline_of(None))
        return group.call_each("save", [(str(directory), names, limit)] * group.world_size)

    def gather(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Put the weights back into the model, on CPU, and stop the workers.

        Raises:
            WrongProcessError: this is a forked process. Reading the weights gives their memory back, which is the
                parent's as well.
        """
        self._supervisor.group.check_process()
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
        held = self._store if self._store is not None else WorkerShards(self.plan, self._supervisor.group)
        return FilesAnd(self._checkpoint, held)

    def _release_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _leave_group(self) -> None:
        self._supervisor.stop()
        group = self._supervisor.group
        if self._borrowed and not self._closed and group.alive:
            group.call("drop")
            group.in_use = False
        elif not self._borrowed:
            group.close()
        self._closed = True

    def _start_group(self) -> WorkerGroup:
        assert self._make_group is not None, "a borrowed group is never replaced"
        return self._make_group()


def _attach(
    group: WorkerGroup, plan: ShardPlan, store: ShardStore, checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Give the ranks their weights: those in memory as mappings, those in files to be read by the ranks themselves."""
    fds = [tuple(FileDescriptor(fd) for fd in store.fds_for(rank)) for rank in range(plan.world_size)]
    group.call_each("attach", [(*pair, checkpoint) for pair in fds])
    for names, size in _batches(plan, checkpoint):
        group.call("load", names)
        if progress is not None:
            progress(size)
    group.call("loaded")


def _batches(plan: ShardPlan, checkpoint: Checkpoint) -> Iterator[tuple[list[str], int]]:
    """Tensors to load with one request each, so that progress shows, and their bytes."""
    names: list[str] = []
    size = 0
    for tensor in plan.stored():
        if tensor.name in checkpoint.nodes:
            names.append(tensor.name)
            size += tensor.bytes_whole
            if size >= _BATCH_BYTES:
                yield names, size
                names, size = [], 0
    if names:
        yield names, size


def _revive(
    make_group: Callable[[], WorkerGroup],
    skeleton: Skeleton,
    plan: ShardPlan,
    store: ShardStore,
    checkpoint: Checkpoint,
) -> WorkerGroup:
    """A group that has the model. It knows nothing of its deployment, which the supervisor's thread must not keep."""
    group = make_group()
    try:
        group.call("build", skeleton)
        _attach(group, plan, store, checkpoint)
    except BaseException:
        group.close()
        raise
    return group
