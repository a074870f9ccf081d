"""Gives a group of workers its model: the modules, the weights in memory, and those in files, which the ranks read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.source import Checkpoint
from parallelformers_ng.checkpoint.store import ShardStore
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.wire.leaves import FileDescriptor

_BATCH_BYTES = 1 << 30  # weights loaded with one request, so that a progress bar moves


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
        group.call("build", skeleton)
        attach(group, plan, store, checkpoint)
    except BaseException:
        group.close()
        raise
    return group
