"""Starts the groups of workers of a model, and loads the model onto a group."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from parallelformers_ng.checkpoint.loading import Checkpoint
from parallelformers_ng.checkpoint.progress import Progress
from parallelformers_ng.checkpoint.skeleton import Skeleton
from parallelformers_ng.checkpoint.store import ShardStore
from parallelformers_ng.errors import ParallelError
from parallelformers_ng.hosts.launcher_choice import elsewhere
from parallelformers_ng.live_code.loaded_by_path import specs_by_path
from parallelformers_ng.option_checks import read_options
from parallelformers_ng.options import FitOptions, WorkerOptions
from parallelformers_ng.runtime.cores import threads_of_rank
from parallelformers_ng.runtime.group import WorkerGroup
from parallelformers_ng.runtime.placement import check_platform, placement
from parallelformers_ng.runtime.spawn import module_path
from parallelformers_ng.sharding.plan import ShardPlan
from parallelformers_ng.sharding.policy_registry import written_policies
from parallelformers_ng.wire.frame import FileDescriptor
from parallelformers_ng.worker.preload import IMPORTS

RUNNER = "parallelformers_ng.worker.runner:ModelRunner"
# Options of workers that belong to a model and its weights. `start_group` refuses these options.
_OF_A_MODEL = ("restart", "max_restarts", "restart_window", "replicas", "host_copy")
_BATCH_BYTES = 1 << 30  # bytes of weights that one request loads; small enough that a progress bar moves


def group_makers(
    num_gpus: int | None, options: WorkerOptions, fit: FitOptions
) -> tuple[list[functools.partial[WorkerGroup]], FitOptions]:
    """Return a function per replica that starts its group, and the fit options with all open values filled in.

    In a torchrun job the function returns only in the process of rank 0; the other processes become workers.
    """
    check_platform()
    count, ids = options.replicas, options.device_ids
    remote_ranks = elsewhere(num_gpus, options, fit)
    if remote_ranks is None:
        size, kind = placement(num_gpus, options.device, ids, count)
    else:
        size, kind = placement(remote_ranks.count, options.device, ids, count, remote_ranks.devices)
        if fit.is_open:
            ranks_per_host = remote_ranks.each(size, kind)
            fit = fit.over([ranks_per_host] * (size // ranks_per_host))
    makers = [
        functools.partial(
            WorkerGroup,
            size,
            kind,
            target=RUNNER,
            imports=IMPORTS,
            device_ids=None if ids is None else ids[index * size : (index + 1) * size],
            backend=options.backend,
            timeout=options.timeout,
            start_timeout=options.start_timeout,
            threads=threads_of_rank(size) if fit.has_stages and remote_ranks is None else None,
            among=(index, count),
            hosts=None if remote_ranks is None else functools.partial(remote_ranks.make, fit.tensor or 1),
        )
        for index in range(count)
    ]
    return makers, fit


@dataclass(frozen=True)
class StoredModel:
    """A model in the form from which ranks load it. Any number of groups can load it.

    A `StoredModel` has no reference to the caller's model or to its `Deployment`: the thread of a supervisor has a
    `StoredModel`, and must not keep the model alive.
    """

    skeleton: Skeleton
    plan: ShardPlan
    store: ShardStore
    checkpoint: Checkpoint

    def load(self, group: WorkerGroup, progress: Progress | None = None, part: str = "") -> None:
        """Make the ranks of a group load their weights, after `build`.

        `part` is "" for the model, or the name of another runner attribute that loads weights, such as "assistant.".
        """
        fds = [tuple(FileDescriptor(fd) for fd in self.store.fds_for(rank)) for rank in range(self.plan.world_size)]
        stored = self.checkpoint.as_stored(self.plan)
        group.call_each(part + "attach", [(of_rank, stored) for of_rank in fds])
        tensors = deque(tensor for tensor in self.plan.as_stored.stored() if stored.is_read(tensor))
        while tensors:
            names, size = list[str](), 0
            while tensors and size < _BATCH_BYTES:
                names.append(tensors[0].name)
                size += tensors.popleft().bytes_whole
            group.call(part + "load", names)
            if progress is not None:
                progress(size)
        group.call(part + "loaded")

    def revive(self, make_group: Callable[[], WorkerGroup]) -> WorkerGroup:
        group = make_group()
        try:
            group.call("extend_path", module_path(), specs_by_path())
            group.call("build", self.skeleton)
            self.load(group)
        except BaseException:
            group.close()
            raise
        return group


def start_group(num_gpus: int | None = None, **options: Any) -> WorkerGroup:
    """Start workers that serve one model after another, so that only the first model waits for the start.

    `with start_group(2) as group: parallelize(model, workers=group)`.

    Args:
        num_gpus: same as in `parallelize`.
        options: fields of `WorkerOptions`, except the restart options, `replicas` and `host_copy`. A group from
            `start_group` is not restarted, because a restart needs the weights of a model.

    Returns:
        The group, ready to serve; pass it to `parallelize` as `workers`.

    Raises:
        PlacementError: there are fewer devices than requested, or more than 256 ranks on this machine.
        StartupError: a worker could not start.
        SharedMemoryError: the system has too little memory for the collectives.
        ParallelError: an option has a wrong value or an unknown name, or `start_group` does not take the option.
        UnsupportedPlatformError: see `parallelize`.
        SystemExit: this process of a torchrun job does not have rank 0.
    """
    for name in _OF_A_MODEL:
        if name in options:
            raise ParallelError(
                f"start_group takes no {name}: its group serves one model after another and is not restarted; pass"
                f" {name} to parallelize as workers={{{name!r}: …}}"
            )
    (make,), _ = group_makers(num_gpus, read_options(WorkerOptions, options, "start_group"), FitOptions())
    group = make(wait=False)
    try:
        # While the workers import torch, this process imports the policies and the weight conversions.
        written_policies()
        get_checkpoint_conversion_mapping("")
        group.wait_until_ready()
    except BaseException:
        group.close()
        raise
    return group
