"""Safe look-ups of ids on a device, where an id beyond the table would end the process.

A CUDA kernel that meets such an id asserts; then nothing works in its process. So ids are clamped before the look-up,
the smallest and largest are recorded on the device, and a request with a bad id is refused at its end. Nothing waits
for the device meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import functional

_seen: dict[tuple[torch.device, int], torch.Tensor] = {}
"""(device, rows of a table) → the lowest and the highest id that were looked up in such a table, int64 `[2]`."""
_held: dict[tuple[torch.device, int], torch.Tensor] = {}
"""What `_seen` was at the last `hold`."""

_look_up = functional.embedding


def in_range(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Clamp ids on a device to the table; record the smallest and the largest."""
    if not ids.numel() or not rows:
        return ids
    key = ids.device, rows
    if key not in _seen:
        _seen[key] = ids.new_tensor((0, rows - 1), dtype=torch.long)
    lowest, highest = _seen[key].unbind()
    low, high = torch.aminmax(ids)
    lowest.copy_(torch.minimum(lowest, low))
    highest.copy_(torch.maximum(highest, high))
    return ids.clamp(0, rows - 1)


def guard_look_ups() -> None:
    """Have every embedding of this process look up ids in range, from now on. What is compiled does so as it is: it
    sees no ids but those that the model chose."""
    functional.embedding = _guarded


@functools.wraps(_look_up)  # by which the code of the caller's program is known to be the same
def _guarded(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if not is_compiling() and input.device.type != "cpu":
        input = in_range(input, weight.shape[0])
    return _look_up(input, weight, *args, **kwargs)


@contextlib.contextmanager
def checked_look_ups() -> Iterator[None]:
    """Around a request.

    Raises:
        IndexError: at its end, where an id was out of range. The message names it, and the rows of its table.
    """
    try:
        yield
    except BaseException:
        _forgive()
        raise
    for (_, rows), seen in _seen.items():
        low, high = seen.tolist()
        if low < 0 or high >= rows:
            _forgive()
            raise IndexError(f"index out of range in self: id {low if low < 0 else high}, vocabulary of {rows}")


def hold() -> None:
    """Remember the notes as they are: what follows may be undone."""
    for key, seen in _seen.items():
        if key in _held:
            _held[key].copy_(seen)
        else:
            _held[key] = seen.clone()


def take_back() -> None:
    """Have the notes be what they were at the last `hold`."""
    for key, bounds in _held.items():
        _seen[key].copy_(bounds)


def _forgive() -> None:
    """Reset the record of ids to its state before the first look-up. Their memory stays: recorded look-ups write
    there."""
    for (_, rows), seen in _seen.items():
        seen[:1].fill_(0)
        seen[1:].fill_(rows - 1)


def forget() -> None:
    """Let the notes go, and the memory that they take on the device. Nothing that was recorded may run afterwards."""
    _seen.clear()
    _held.clear()
