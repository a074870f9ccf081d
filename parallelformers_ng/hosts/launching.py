"""Chooses the launcher that starts the workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallelformers_ng.errors import PlacementError
from parallelformers_ng.hosts import torchrun
from parallelformers_ng.hosts.hosts import Hosts
from parallelformers_ng.hosts.ray import Connection, RayHosts, bundle_of, ranks_of_each
from parallelformers_ng.options import FitOptions, RayOptions, WorkerOptions, read_options


@dataclass(frozen=True)
class Elsewhere:
    """The ranks that a launcher starts, not this process.

    Attributes:
        make: makes the launcher of one group, from the number of adjacent ranks that share a host.
        count: how many they are to be, None if nobody has said so.
        devices: how many CUDA devices there are, as far as it decides between these and the CPU.
        each: how many each host will have of so many ranks on "cpu" or "cuda". Asked where stages lie within hosts.
    """

    make: Callable[[int], Hosts]
    count: int | None
    devices: int
    each: Callable[[int, str], int]


def elsewhere(num_gpus: int | None, options: WorkerOptions, fit: FitOptions) -> Elsewhere | None:
    """Return how the ranks of a group are started where this process does not do it; None if it does.

    In a torchrun job it does not return but in the process of rank 0: the others serve.

    Args:
        num_gpus: argument of `parallelize`.
        options: say which launcher.
        fit: says which ranks are to be on one host.

    Raises:
        PlacementError: the launcher cannot start so many.
        ParallelError, StartupError: see `Connection`.
    """
    if options.launcher == "torchrun" or (options.launcher == "auto" and torchrun.is_running()):
        count = torchrun.world_size(num_gpus)
        devices = torch.cuda.device_count() if options.device != "cpu" else 0
        if devices and options.replicas > 1:
            raise PlacementError(
                f"replicas is {options.replicas}, and each process of a torchrun job has one device; leave it out, or"
                " start a job for each replica"
            )
        torchrun.serve_unless_caller()
        return Elsewhere(lambda _: Hosts(torchrun.Torchrun()), count, devices, lambda *_: torchrun.ranks_of_each())
    if options.launcher != "ray":
        return None
    wanted = read_options(RayOptions, options.ray, "ray")
    early = [Connection(wanted)] if options.device == "auto" or fit.is_open else []  # the cluster says what there is
    nodes = early[0].nodes() if early else []

    def make(width: int) -> Hosts:
        return Hosts(RayHosts(wanted, early.pop() if early else Connection(wanted), width))

    def each(world_size: int, device: str) -> int:
        return ranks_of_each(world_size, bundle_of(wanted, device, 1), nodes)

    return Elsewhere(make, num_gpus, int(sum(node.get("GPU", 0) for node in nodes)), each)
