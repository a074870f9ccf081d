"""Chooses the launcher that starts the workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from parallelformers_ng.errors import PlacementError
from parallelformers_ng.hosts import torchrun
from parallelformers_ng.hosts.hosts import Hosts
from parallelformers_ng.hosts.ray import Connection, RayHosts, bundle_of, ranks_of_each
from parallelformers_ng.option_checks import read_options
from parallelformers_ng.options import FitOptions, RayOptions, WorkerOptions


@dataclass(frozen=True)
class Elsewhere:
    """Start of ranks by torchrun or Ray, for groups whose ranks this process does not start itself.

    Attributes:
        make: function from the number of consecutive ranks that must share a host to the `Hosts` of one group.
        count: number of ranks, or None for the default.
        devices: number of CUDA devices, used to choose between CUDA and CPU; 0 if the number is unknown.
        each: function from (number of ranks, "cpu" or "cuda") to the number of ranks of each host, because a pipeline
            stage must not span hosts.
    """

    make: Callable[[int], Hosts]
    count: int | None
    devices: int
    each: Callable[[int, str], int]


def elsewhere(num_gpus: int | None, options: WorkerOptions, fit: FitOptions) -> Elsewhere | None:
    """Choose the launcher by `options.launcher`; None if this process starts the ranks itself.

    In a torchrun job, the function returns only in the process of rank 0; all other processes end in it.
    """
    if options.launcher == "torchrun" or (options.launcher == "auto" and torchrun.is_running()):
        count = torchrun.world_size(num_gpus)
        devices = torch.cuda.device_count() if options.device != "cpu" else 0
        if devices and options.replicas > 1:
            raise PlacementError(
                f"replicas is {options.replicas}, but each process of a torchrun job has only one device; leave"
                " replicas out, or start one job per replica"
            )
        torchrun.serve_unless_caller()
        ranks_of_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return Elsewhere(lambda _: Hosts(torchrun.Torchrun()), count, devices, lambda *_: ranks_of_node)
    if options.launcher != "ray":
        return None
    ray_options = read_options(RayOptions, options.ray, "ray")
    # Connect to the cluster now if its resources decide between CPU and CUDA, or the number of ranks of a stage.
    connections = [Connection(ray_options)] if options.device == "auto" or fit.is_open else []
    nodes = connections[0].nodes() if connections else []

    def make(width: int) -> Hosts:
        return Hosts(RayHosts(ray_options, connections.pop() if connections else Connection(ray_options), width))

    def each(world_size: int, device: str) -> int:
        return ranks_of_each(world_size, bundle_of(ray_options, device, 1), nodes)

    return Elsewhere(make, num_gpus, int(sum(node.get("GPU", 0) for node in nodes)), each)
