"""Chooses the number and devices of workers, checks that this system can run workers, and selects a rank's device."""

from __future__ import annotations

import errno
import functools
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from parallelformers_ng.errors import PlacementError, StartupError, UnsupportedPlatformError

log = logging.getLogger("parallelformers_ng")
_say_once = functools.cache(log.warning)

NCCL_PHASE = "connecting to its peers by NCCL"  # reported by a rank while it connects, which may hang with NCCL
NCCL_REMEDY = (
    " NCCL hangs on machines where copies between devices do not work, for example virtual machines or machines with an"
    " IOMMU: NCCL_P2P_DISABLE=1 in the environment turns these copies off."
)


def placement(
    num_gpus: int | None, device: str, device_ids: Sequence[int] | None, replicas: int = 1, elsewhere: int | None = None
) -> tuple[int, str]:
    """Return the number of workers of each replica, and "cpu" or "cuda".

    A warning is logged once if `device` is "auto" and there is no CUDA device.

    Args:
        device_ids: CUDA device of each rank of all replicas; None uses 0, 1, 2, ….
        elsewhere: number of CUDA devices of the hosts on which a launcher will start the ranks, 0 if unknown;
            None if this process starts the ranks.
    """
    is_here = elsewhere is None
    available = torch.cuda.device_count() if elsewhere is None else elsewhere
    kind = device if device != "auto" else "cuda" if available else "cpu"
    if device == "auto" and kind == "cpu":
        where = "here" if is_here else "on the hosts of the ranks"
        _say_once(
            f"no CUDA device {where}: the workers run on the CPU (workers={{'device': 'cpu'}} silences this warning)"
        )
    if device_ids is not None and not is_here:
        raise PlacementError(
            f"device_ids {list(device_ids)} name devices of this machine, but the launcher chooses the device of each"
            " rank; leave device_ids out, and set CUDA_VISIBLE_DEVICES on each host to restrict its devices"
        )
    if num_gpus is None and kind == "cuda" and not is_here:
        raise PlacementError("num_gpus is None, and the ranks are on other hosts; set num_gpus to the number of ranks")
    count = num_gpus
    if count is None:
        count = 2 if kind == "cpu" else (len(device_ids) if device_ids else available) // replicas
    check_count(count)
    if kind == "cpu" and device_ids is not None:
        raise PlacementError(f"device_ids {list(device_ids)} name CUDA devices, but the workers run on the CPU")
    if kind == "cpu" or not is_here:
        return count, kind
    request = f"num_gpus is {count}" + (f" for each of {replicas} replicas" if replicas > 1 else "")
    ids = list(device_ids) if device_ids is not None else list(range(count * replicas))
    if len(ids) != count * replicas:
        raise PlacementError(f"{request}, but device_ids names {len(ids)} devices: {ids}")
    missing = [index for index in ids if not 0 <= index < available]
    if missing:
        raise PlacementError(f"{request}, but only {available} CUDA devices are visible (no device {missing})")
    return count, kind


def check_count(count: Any, argument: str = "num_gpus") -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise PlacementError(f"{argument} is {count!r}; it takes a number, at least 1")


def check_platform() -> None:
    if sys.platform != "linux":
        raise UnsupportedPlatformError(
            f"parallelize needs Linux (memfd, pidfd) and this is {sys.platform}; use a Linux container. plan() works"
            " here"
        )
    if not os.path.isdir("/proc/self/fd"):
        raise UnsupportedPlatformError("parallelize needs /proc, which is not mounted here: mount -t proc proc /proc")
    calls = {"memfd_create": lambda: os.memfd_create("test"), "pidfd_open": lambda: os.pidfd_open(os.getpid())}
    for name, call in calls.items():
        try:
            os.close(call())
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EPERM, errno.EACCES):
                raise UnsupportedPlatformError(
                    f"parallelize needs the system call {name}, which this system or its sandbox forbids ({error});"
                    " allow it in the seccomp profile, or use Linux 5.3 or later"
                ) from error
            raise
    if patched := _patched_by_gevent():
        raise UnsupportedPlatformError(
            f"gevent's monkey.patch_all() has replaced {', '.join(patched)} of this process, and the threads that send"
            " requests to the workers need the original modules. Use a server with threads (gunicorn -k gthread), or"
            " parallelize in a separate process that the gevent workers call (parallelformers-ng serve)"
        )


def _patched_by_gevent() -> list[str]:
    monkey = sys.modules.get("gevent.monkey")
    modules = ("thread", "threading", "socket", "select", "selectors", "subprocess", "os", "queue")
    return [] if monkey is None else [module for module in modules if monkey.is_module_patched(module)]


def take_device(device: torch.device) -> None:
    """Select the CUDA device of a rank, with a helpful error if CUDA cannot use the device.

    The caller counts devices with NVML, which needs no CUDA context. CUDA may have fewer devices: CUDA shows a process
    only one slice of a device in MIG mode, and a driver may be too old for a listed device.
    """
    listed = torch.cuda.device_count()  # torch counts by NVML, as in the caller, until CUDA is initialized
    try:
        torch.cuda.set_device(device)
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        if not torch.cuda.is_initialized():
            raise StartupError(
                f"CUDA cannot be used on {device}: {reason}. The driver lists {listed} devices; this torch was built"
                f" for CUDA {torch.version.cuda}. Install a newer driver, or a torch built for an older CUDA"
            ) from error
        raise StartupError(
            f"CUDA does not have {device}: {reason}. The driver lists {listed} devices and CUDA has"
            f" {torch.cuda.device_count()}. CUDA shows a process only one slice of a device in MIG mode: name a slice"
            " for each rank in CUDA_VISIBLE_DEVICES (nvidia-smi -L lists slices as MIG-…), or set a smaller num_gpus="
        ) from error
