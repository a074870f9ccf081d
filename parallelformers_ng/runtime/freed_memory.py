"""Memory that is free and that an allocator keeps all the same."""

from __future__ import annotations

import contextlib
import ctypes

import torch

TRIM_EVERY = 64 << 20
"""Bytes given up or read between two calls that hand free pages of the heap back to the system."""


def give_back_freed() -> None:
    """Hand freed memory back. glibc may keep heap pages after the model's small tensors: they go to the system.
    torch keeps device memory for this process: it goes to the ranks."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim_heap()


def trim_heap() -> None:
    """Hand freed pages of the heap back to the system."""
    with contextlib.suppress(OSError, AttributeError):  # another C library has no malloc_trim, and needs none
        ctypes.CDLL(None).malloc_trim(0)
