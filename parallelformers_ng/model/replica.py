"""A group of workers that has the whole model among its ranks, and the caches that they hold."""

from __future__ import annotations

import functools
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import ShardStore
from parallelformers_ng.errors import PlacementError
from parallelformers_ng.generation.cache_registry import CacheRegistry
from parallelformers_ng.hosts.launching import elsewhere
from parallelformers_ng.options import FitOptions, WorkerOptions
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.placement import check_platform, placement, placement_elsewhere
from parallelformers_ng.runtime.supervisor import RestartLimit, Supervisor
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.wire.format import FileDescriptor

RUNNER = "parallelformers_ng.worker.runner:ModelRunner"
_BATCH_BYTES = 1 << 30  # weights loaded with one request, so that a progress bar moves


def group_makers(
    num_gpus: int | None, options: WorkerOptions, fit: FitOptions
) -> tuple[list[functools.partial[WorkerGroup]], FitOptions]:
    """What starts the group of each replica, at first and again; and `fit` in full.

    In a torchrun job it does not return but in the process of rank 0: the others serve.

    Args:
        fit: where it has stages, of the ranks of a replica one computes at a time: each gets the threads that it would
            have if there were no other replica, which is busy elsewhere. The ranks of a stage are on one host.

    Raises:
        UnsupportedPlatformError: workers cannot run on this system.
        PlacementError: there are not as many devices as asked for.
    """
    check_platform()
    count, ids = options.replicas, options.device_ids
    others = elsewhere(num_gpus, options, fit)
    size, kind = (
        placement(num_gpus, options.device, ids, count)
        if others is None
        else placement_elsewhere(others.count, options.device, ids, others.devices)
    )
    if others is not None and fit.is_open:
        each = others.each(size, kind)
        fit = fit.over([each] * (size // each))
    makers = [
        functools.partial(
            WorkerGroup,
            size,
            kind,
            target=RUNNER,
            device_ids=None if ids is None else ids[index * size : (index + 1) * size],
            backend=options.backend,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            threads=max(1, usable_cpus() // size) if fit.has_stages and others is None else None,
            among=(index, count),
            hosts=None if others is None else functools.partial(others.make, fit.tensor or 1),
        )
        for index in range(count)
    ]
    return makers, fit


class Replica:
    """The workers that calls of a model are sent to.

    A group whose worker died is not mended: all ranks live and die together, and a new group maps the same memory.

    Args:
        group: running or about to.
        make_group: starts another in the place of one that died. None: `group` is borrowed, to be left running, and is
            not replaced when it dies.

    Attributes:
        supervisor: has the group, and replaces it.
        caches: the registry of the caches that the workers hold.

    Raises:
        PlacementError: the group serves another model.
    """

    def __init__(self, group: WorkerGroup, make_group: Callable[[], WorkerGroup] | None) -> None:
        if group.in_use:
            gc.collect()  # the other model may be one that nobody holds any more
        if group.in_use:
            raise PlacementError("the group given serves another model; end that one first, or start another group")
        group.user = weakref.ref(self)
        self.supervisor = Supervisor(group)
        self.caches = CacheRegistry(self)
        self._make_group = make_group
        self._is_over = False

    @property
    def group(self) -> WorkerGroup:
        """The group, alive or not."""
        return self.supervisor.current[0]

    def keep_alive(
        self, skeleton: Skeleton, plan: ShardPlan, store: ShardStore, checkpoint: Checkpoint, limit: RestartLimit | None
    ) -> None:
        """From now on replace the group where a worker ends, unless it is borrowed."""
        if self._make_group is not None:
            again = functools.partial(revive, self._make_group, skeleton, plan, store, checkpoint)
            self.supervisor = Supervisor(self.group, again, limit)

    def ready(self, deadline: float | None = None) -> tuple[WorkerGroup, int]:
        """The group to send requests to, and its incarnation. While one is being started, wait for it.

        Args:
            deadline: on the clock of `time.monotonic`; by default the group's.

        Raises:
            As `Supervisor.ready`.
        """
        workers = self.supervisor.current
        if workers[0].ready:
            return workers
        return self.supervisor.ready(self.deadline_of(None) if deadline is None else deadline)

    def deadline_of(self, timeout: float | None) -> float:
        """When a call must be done that begins now, on the clock of `time.monotonic`."""
        return self.group.deadline(timeout)

    @property
    def incarnation(self) -> int:
        """How often the workers were started again."""
        return self.supervisor.current[1]

    def call(self, method: str, *args: Any) -> Any:
        """Have the ranks run a method; the first one's answer. Raises what a request would."""
        deadline = self.deadline_of(None)
        return self.ready(deadline)[0].call(method, *args, timeout=deadline - time.monotonic())

    def call_each(self, method: str, *per_rank: tuple[Any, ...]) -> list[Any]:
        """Have the ranks run a method, with the same arguments or with their own; the answers of all."""
        deadline = self.deadline_of(None)
        return self.ready(deadline)[0].call_each(method, per_rank, timeout=deadline - time.monotonic())

    def leave(self) -> None:
        """Stop the workers, or let go of borrowed ones. Idempotent."""
        self.supervisor.stop()
        group = self.group
        if self._make_group is not None:
            group.close()
        elif not self._is_over and group.alive:
            group.call("drop")
            group.user = None
        self._is_over = True


def attach(
    group: WorkerGroup, plan: ShardPlan, store: ShardStore, checkpoint: Checkpoint, progress: Progress | None = None
) -> None:
    """Give the ranks their weights: those in memory as mappings, those in files to be read by the ranks themselves."""
    fds = [tuple(FileDescriptor(fd) for fd in store.fds_for(rank)) for rank in range(plan.world_size)]
    held = checkpoint.held(plan)
    group.call_each("attach", [(of_rank, held) for of_rank in fds])
    for names, size in _batches(plan.held, held):
        group.call("load", names)
        if progress is not None:
            progress(size)
    group.call("loaded")


def _batches(plan: ShardPlan, checkpoint: Checkpoint) -> Iterator[tuple[list[str], int]]:
    """Tensors to load with one request each, so that progress shows, and their bytes."""
    names: list[str] = []
    size = 0
    for tensor in plan.stored():
        if checkpoint.is_read(tensor):
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
