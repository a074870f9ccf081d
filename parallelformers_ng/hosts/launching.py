"""Which launcher starts the workers."""

from __future__ import annotations

from collections.abc import Callable

from parallelformers_ng.hosts import torchrun
from parallelformers_ng.hosts.hosts import Hosts
from parallelformers_ng.hosts.ray import RayHosts
from parallelformers_ng.options import RayOptions, WorkerOptions, read_options


def hosts_of(num_gpus: int | None, options: WorkerOptions) -> tuple[Callable[[], Hosts] | None, int | None]:
    """What starts the ranks of a group, None where this process does; and how many they are to be.

    In a torchrun job it does not return but in the process of rank 0: the others serve.

    Args:
        num_gpus: as it was asked for.
        options: say which launcher.

    Raises:
        PlacementError: the launcher cannot start so many.
    """
    if options.launcher == "torchrun" or (options.launcher == "auto" and torchrun.is_running()):
        count = torchrun.world_size(num_gpus)
        torchrun.serve_unless_caller()
        return lambda: Hosts(torchrun.Torchrun()), count
    if options.launcher == "ray":
        wanted = read_options(RayOptions, options.ray, "ray")
        return lambda: Hosts(RayHosts(wanted)), num_gpus
    return None, num_gpus
