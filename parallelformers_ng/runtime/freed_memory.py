"""Returns freed memory, which allocators would keep, to the system and the GPUs."""

from __future__ import annotations

import contextlib
import ctypes

import torch

TRIM_EVERY = 64 << 20  # call `trim_heap` after each 64 MiB that were freed or read


def give_back_freed() -> None:
    """Return freed heap pages of this process to the system, and torch's unused device memory to the device.

    glibc may keep heap pages of freed small tensors. The ranks need the device memory that torch keeps in this process.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    with contextlib.suppress(OSError, AttributeError):  # only glibc has `malloc_trim`
        ctypes.CDLL(None).malloc_trim(0)
