"""The number of workers and their devices, and the check that this system can run them."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from parallelformers_ng.errors import PlacementError, UnsupportedPlatformError

log = logging.getLogger("parallelformers_ng")


def placement(
    num_gpus: int | None, device: str, device_ids: Sequence[int] | None, replicas: int = 1
) -> tuple[int, str]:
    """Return number of workers of a replica and kind of device, from the arguments of these names of `parallelize`.

    Returns:
        (world size, "cpu" or "cuda").

    Raises:
        PlacementError: there are not as many devices as asked for.
    """
    available = torch.cuda.device_count()
    kind = device if device != "auto" else "cuda" if available else "cpu"
    if device == "auto" and kind == "cpu":
        _say_once(
            "no CUDA device here: the workers run on the CPU (workers={'device': 'cpu'} says so and silences this)"
        )
    count = num_gpus
    if count is None:
        count = 2 if kind == "cpu" else (len(device_ids) if device_ids else available) // replicas
    check_count(count)
    if kind == "cpu":
        if device_ids is not None:
            raise PlacementError(f"device_ids {list(device_ids)} name CUDA devices, but the workers run on the CPU")
        return count, kind
    request = f"num_gpus is {count}" + (f" for each of {replicas} replicas" if replicas > 1 else "")
    ids = list(device_ids) if device_ids is not None else list(range(count * replicas))
    if len(ids) != count * replicas:
        raise PlacementError(f"{request}, but device_ids names {len(ids)} devices: {ids}")
    missing = [index for index in ids if not 0 <= index < available]
    if missing:
        raise PlacementError(f"{request}, but only {available} CUDA devices are visible (no device {missing})")
    return count, kind


def placement_elsewhere(
    num_gpus: int | None, device: str, device_ids: Sequence[int] | None, devices: int
) -> tuple[int, str]:
    """Do the same as `placement`, for ranks that this process does not start.

    Args:
        devices: how many CUDA devices there are where they will be, as far as that is known.

    Raises:
        PlacementError: it is not said how many devices to take, or which.
    """
    kind = device if device != "auto" else "cuda" if devices else "cpu"
    if device == "auto" and kind == "cpu":
        _say_once(
            "no CUDA device where the ranks will be: they run on the CPU (workers={'device': 'cpu'} says so and"
            " silences this)"
        )
    if device_ids is not None:
        raise PlacementError(
            f"device_ids {list(device_ids)} name devices of this machine, and the launcher gives each rank its own;"
            " leave them out. CUDA_VISIBLE_DEVICES on a host says what there is"
        )
    if num_gpus is None and kind == "cuda":
        raise PlacementError("num_gpus is None, and the ranks are on other hosts; say how many there are to be")
    count = 2 if num_gpus is None else num_gpus
    check_count(count)
    return count, kind


def check_count(count: Any, argument: str = "num_gpus") -> None:
    """Raise PlacementError where `count` is no number of devices."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlacementError(f"{argument} is {count!r}; it takes a number, at least 1")


def check_platform() -> None:
    """Raise UnsupportedPlatformError if workers cannot run."""
    if sys.platform != "linux":
        raise UnsupportedPlatformError(
            f"parallelize needs Linux (memfd, pidfd) and this is {sys.platform}; plan() works here, a"
            " container would do"
        )
    if not os.path.isdir("/proc/self/fd"):
        raise UnsupportedPlatformError("parallelize needs /proc, which is not mounted here: mount -t proc proc /proc")
    if patched := _patched_by_gevent():
        raise UnsupportedPlatformError(
            f"gevent's monkey.patch_all() has replaced {', '.join(patched)} of this process, and the threads that speak"
            " to the workers need the real ones. Use a server with threads (gunicorn -k gthread), or parallelize in a"
            " process of its own and let the gevent workers ask it (parallelformers-ng serve)"
        )


def _patched_by_gevent() -> list[str]:
    """Return the modules that gevent has patched and that threads, processes and sockets depend on."""
    monkey = sys.modules.get("gevent.monkey")
    modules = ("thread", "threading", "socket", "select", "selectors", "subprocess", "os", "queue")
    return [] if monkey is None else [module for module in modules if monkey.is_module_patched(module)]


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)
