"""Reads the memory limits in `fit={"max_memory": …}`: a size for each device and for "cpu", as in accelerate."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from parallelformers_ng.collectives.arena import available_memory
from parallelformers_ng.errors import ParallelError, UnsupportedPlatformError
from parallelformers_ng.option_checks import CPU, check_devices, sizes_in_bytes
from parallelformers_ng.options import FitOptions


@dataclass(frozen=True)
class Budget:
    """Memory limits for the weights of a replica.

    Attributes:
        devices: for each rank, the name and the limit in bytes of its device. With several replicas, this is the device
            with the smallest limit.
        cpu: RAM in bytes for the offloaded weights of all ranks of a replica.
        folder: folder for weights that do not fit in RAM.
        is_cuda: whether ranks compute on CUDA devices, to which weights in RAM must be copied.
    """

    devices: list[tuple[str, int]]
    cpu: int
    folder: str | None
    is_cuda: bool


def budget_of(
    options: FitOptions, world_size: int, kind: str, device_ids: Sequence[int] | None = None, replicas: int = 1
) -> Budget | None:
    """Return the memory limits that the options set; None if the options set no limits.

    The function creates the offload folder if it does not exist. The default for "cpu" is the available memory of the
    machine. On CUDA devices, the replicas share the limit for "cpu" equally.

    Args:
        kind: "cpu" or "cuda"; with "cpu", the device numbers in `max_memory` are rank numbers.
        device_ids: CUDA device of each rank of the first replica, then of the second, …; by default 0, 1, 2, ….
    """
    if options.max_memory is None:
        return None
    apart = 1 if kind == "cpu" else replicas  # CPU replicas share one copy of the weights
    keys = list(range(world_size * apart) if kind == "cpu" or device_ids is None else device_ids)
    check_devices(options.max_memory, keys)
    sizes = sizes_in_bytes(options.max_memory)
    if options.offload_folder is not None:
        _check_folder(options.offload_folder)
    cpu = (sizes[CPU] if CPU in sizes else _free_memory()) // apart
    rooms = {key: sizes[key] // keys.count(key) for key in keys}  # ranks share the limit of their device
    least = [min(keys[rank::world_size], key=lambda key: rooms[key]) for rank in range(world_size)]
    return Budget([(_name(key, keys), rooms[key]) for key in least], cpu, options.offload_folder, kind == "cuda")


def _free_memory() -> int:
    try:
        return available_memory()
    except UnsupportedPlatformError as error:
        raise UnsupportedPlatformError(f"fit: {error}. plan() works here if max_memory has a size for 'cpu'") from None


def _name(key: int, keys: Sequence[int]) -> str:
    sharers = keys.count(key)
    return f"device {key}" + (f", for each of its {sharers} ranks," if sharers > 1 else "")


def _check_folder(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ParallelError(f"fit: offload_folder {folder} cannot be written to: {error.strerror}") from error
