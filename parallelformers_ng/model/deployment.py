"""What stands behind a parallelized model: its plan, its worker group and the memory that holds its shards."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.nodes import Node, of_ranks
from parallelformers_ng.checkpoint.progress import Progress, progress_bar
from parallelformers_ng.checkpoint.reading import read_copy, read_shard
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import ShardStore, hand_over, take_back
from parallelformers_ng.checkpoint.writing import WrittenFile
from parallelformers_ng.errors import PlacementError, SharedMemoryError
from parallelformers_ng.generation.cache_registry import CacheRegistry
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.supervisor import RestartLimit, Supervisor
from parallelformers_ng.sharding.plan import WHOLE, ShardPlan, TensorPlan
from parallelformers_ng.wire.format import OUT_OF_MEMORY, FileDescriptor

RUNNER = "parallelformers_ng.worker.runner:ModelRunner"
_BATCH_BYTES = 1 << 30  # weights loaded with one request, so that a progress bar moves


class Deployment:
    """Owns the workers of one model and the weights they map.

    A group whose worker died is not mended: all ranks live and die together, and a new group maps the same memory.

    Attributes:
        plan: how the model is cut.
        caches: the registry of the caches that the workers hold.
        supervisor: has the group, and replaces it.
        ended: whether the workers and the weights that they hold are gone.

    Args:
        model: the model, weights loaded. After `start` its tensors are on `meta`.
        plan: how it is cut.
        group: for the plan's world size, running or about to.
        make_group: starts another in the place of one that died. None: `group` is borrowed, to be left running, and is
            not replaced when it dies.
        keep_weights: keep the memory that the weights were handed over in. On CPU it is the shards themselves; on CUDA
            it is a copy in host memory, without which a dead group cannot be replaced.
        restart: whether a dead group is replaced.
        limit: when to give up replacing it.
        show_progress: show a bar when the weights are gathered.
        checkpoint: where the tensors lie that the model does not hold: the workers read them out of these files, and
            again after a restart.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardPlan,
        group: WorkerGroup,
        make_group: Callable[[], WorkerGroup] | None,
        *,
        keep_weights: bool = True,
        restart: bool = True,
        limit: RestartLimit | None = None,
        checkpoint: Checkpoint | None = None,
        show_progress: bool = True,
    ) -> None:
        self.plan = plan
        self.caches = CacheRegistry(self)
        self.show_progress = show_progress
        self._checkpoint = checkpoint or Checkpoint({})
        keep_weights = keep_weights or checkpoint is not None  # what is not in the files is little
        self._make_group = make_group
        self._keeps_weights = keep_weights
        self._restart = restart and make_group is not None and keep_weights
        self._borrowed = make_group is None
        self._limit = limit
        self._lock = threading.Lock()
        self.ended = False
        self._skeleton = Skeleton.of(model, plan)
        if group.in_use:
            gc.collect()  # the other model may be one that nobody holds any more
        if group.in_use:
            raise PlacementError("the group given serves another model; end that one first, or start another group")
        group.user = weakref.ref(self)
        self.supervisor = Supervisor(group)
        self._store: ShardStore | None = None

    def start(self, model: nn.Module, progress: Progress | None = None) -> None:
        """Build the ranks, then hand the weights over. On failure the model has its weights again.

        Everything that can fail without weights fails before the first byte is given up.

        Raises:
            StartupError: a worker could not start.
            SharedMemoryError: the system has no memory for the shards.
        """
        group = self.supervisor.group
        try:
            group.wait_until_ready()
            build_ranks(group, self._skeleton)
            store = self._store = ShardStore(self._checkpoint.in_memory(self.plan))
            hand_over(model, store, progress)
            try:
                attach(group, self.plan, store, self._checkpoint, progress)
                if self._restart and self._make_group is not None:
                    again = functools.partial(
                        revive, self._make_group, self._skeleton, self.plan, store, self._checkpoint
                    )
                    self.supervisor = Supervisor(group, again, self._limit)
            except BaseException:
                take_back(model, store.plan, store.read)
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
        return self.supervisor.ready(deadline)

    def deadline_of(self, timeout: float | None) -> float:
        """When a call must be done that begins now, on the clock of `time.monotonic`."""
        return self.supervisor.group.deadline(timeout)

    @property
    def incarnation(self) -> int:
        """How often the workers were started again."""
        return self.supervisor.current[1]

    @property
    def pids(self) -> list[int]:
        return self.supervisor.group.pids

    def ping(self) -> None:
        """Return once every rank has answered to the others. Raises what a call would."""
        deadline = self.deadline_of(None)
        self.ready(deadline)[0].call("ping", timeout=deadline - time.monotonic())

    def memory(self, what: str) -> dict[str, Any]:
        """What a method of `worker.memory.RankMemory` says on each rank, by device."""
        deadline = self.deadline_of(None)
        group, _ = self.ready(deadline)
        return dict(group.call_each("memory", [(what,)], timeout=deadline - time.monotonic()))

    def read(self, name: str) -> torch.Tensor:
        """One parameter or buffer, whole, on CPU."""
        return self._read(self.plan.tensors[name])

    def gathering(self, what: str, total: int) -> contextlib.AbstractContextManager[Progress]:
        """A progress bar over `total` bytes, where bars are wanted."""
        return progress_bar(f"gathering {what}", total, self.show_progress)

    def node(self, name: str) -> Node:
        """One parameter or buffer, to be read in parts from wherever it lies."""
        if name in self._checkpoint.nodes:
            return self._checkpoint.nodes[name]
        tensor = self.plan.tensors[self.plan.tensors[name].storage]
        part = self._exported if self._store is None else self._store.part
        return of_ranks(tensor, functools.partial(part, tensor))

    def save(self, directory: Path, names: list[str], limit: int, progress: Progress) -> list[list[WrittenFile]]:
        """Every rank writes its files of a sharded directory. Returns what each wrote.

        Args:
            progress: called with the bytes that rank 0 has written; the others write theirs at the same time.
        """
        group, _ = self.ready(self.deadline_of(None))
        return group.call_each("save", [(str(directory), names, limit)], on_event=progress)

    def gather(self, model: nn.Module) -> None:
        """Put the weights back into the model, on CPU, and stop the workers.

        Raises:
            WrongProcessError: this is a forked process. Reading the weights gives their memory back, which is the
                parent's as well.
        """
        self.supervisor.group.check_process()
        with self._lock:
            if self._store is not None:
                self._leave_group()  # first, so that memory can be given back as it is read
            with self.gathering(type(model).__name__, self.plan.bytes_whole) as advance:
                take_back(model, self.plan, self._read, progress=advance)
            self._leave_group()
            self._release_store()

    def close(self) -> None:
        """Stop the workers and let the weights go. Idempotent."""
        with self._lock:
            self._leave_group()
            self._release_store()

    def _read(self, tensor: TensorPlan, release: bool = False) -> torch.Tensor:
        """A tensor, whole: a private view of the file where it is stored so, else in memory of its own."""
        if tensor.storage in self._checkpoint.nodes:
            return read_shard(self._checkpoint.nodes[tensor.storage], WHOLE)
        if self._store is not None:
            return self._store.read(tensor, release)
        return read_copy(self.node(tensor.name), {})

    def _exported(self, tensor: TensorPlan, rank: int) -> torch.Tensor:
        """A rank's part of a tensor, from the rank itself: on CUDA the devices hold the only copy."""
        group = self.supervisor.group
        asked = [([tensor.storage] if each == rank else [],) for each in range(group.world_size)]
        return group.call_each("export", asked)[rank][0]

    def _release_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _leave_group(self) -> None:
        self.supervisor.stop()
        group = self.supervisor.group
        if self._borrowed and not self.ended and group.alive:
            group.call("drop")
            group.user = None
        elif not self._borrowed:
            group.close()
        self.ended = True


def attach(
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


def build_ranks(group: WorkerGroup, skeleton: Skeleton) -> None:
    """Build the modules of a group's ranks. What the first ranks of this process find out about the kernels, later ones
    are told."""
    global _layers_agree
    _layers_agree = group.call("build", skeleton, _layers_agree)


_layers_agree: bool | None = None


def revive(
    make_group: Callable[[], WorkerGroup],
    skeleton: Skeleton,
    plan: ShardPlan,
    store: ShardStore,
    checkpoint: Checkpoint,
) -> WorkerGroup:
    """A group that has the model. It knows nothing of its deployment, which the supervisor's thread must not keep."""
    group = make_group()
    try:
        build_ranks(group, skeleton)
        attach(group, plan, store, checkpoint)
    except BaseException:
        group.close()
        raise
    return group
