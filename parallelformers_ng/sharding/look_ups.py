"""Makes embedding look-ups on a device safe if an id is outside the table.

A CUDA kernel asserts on such an id, and then every CUDA call of the process fails. Therefore ids are clamped before the
look-up, and the smallest and the largest id are recorded on the device. At the end of a request the recorded ids are
checked, so no look-up waits for the device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.compiler import is_compiling
from torch.nn import functional

# (device, number of rows) → lowest and highest id that were looked up in tables of that size, int64 `[2]`.
_seen: dict[tuple[torch.device, int], torch.Tensor] = {}
_snapshot: dict[tuple[torch.device, int], torch.Tensor] = {}  # copy of `_seen` that `hold` made, for `take_back`

_look_up = functional.embedding


def in_range(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Clamp ids to a table of `rows` rows, and record the smallest and the largest id for `check`."""
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
    """Replace `torch.nn.functional.embedding` by a function that clamps ids on devices other than the CPU.

    Compiled code does not clamp ids, because it looks up only tokens that the model itself chose.
    """
    functional.embedding = _guarded


@functools.wraps(_look_up)  # makes checks for foreign code take the replacement for torch's own function
def _guarded(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Later passes of torch.compile call this function with fake tensors while `is_compiling()` is False.
    if input.device.type != "cpu" and not is_compiling() and not is_fake(input):
        input = in_range(input, weight.shape[0])
    return _look_up(input, weight, *args, **kwargs)


@contextlib.contextmanager
def checked_look_ups(at_end: bool = True) -> Iterator[None]:
    """Context for a request that checks the looked-up ids at its end, and after any error resets the recorded ids."""
    try:
        yield
        if at_end:
            check()
    except BaseException:
        _reset()
        raise


def bounds() -> list[torch.Tensor]:
    """Return the lowest and the highest looked-up id of each table size, int64 `[2]`, on the device."""
    return [*_seen.values()]


def check(recorded: Sequence[int] | None = None) -> None:
    """Raise IndexError if an id that was looked up so far is outside its table.

    `recorded` has the values of `bounds()`, if the caller has already copied them from the device.
    """
    if recorded is None:
        recorded = torch.cat(bounds()).tolist() if _seen else []
    # A table may have been added to `_seen` after `recorded` was copied, so the lengths may differ.
    for (_, rows), low, high in zip(_seen, recorded[::2], recorded[1::2], strict=False):
        check_range(low, high, rows)


def check_range(low: int, high: int, rows: int) -> None:
    """Raise IndexError, with the text of torch's look-ups, if the lowest or the highest id is outside the table."""
    if low < 0 or high >= rows:
        raise IndexError(f"index out of range in self: id {low if low < 0 else high}, vocabulary of {rows}")


def hold() -> None:
    """Save the lowest and highest looked-up ids, so that `take_back` can restore them."""
    for key, seen in _seen.items():
        if key in _snapshot:
            _snapshot[key].copy_(seen)
        else:
            _snapshot[key] = seen.clone()


def take_back() -> None:
    """Restore the lowest and highest looked-up ids that `hold` saved; keep those of tables first used since then."""
    for key, bounds in _snapshot.items():
        _seen[key].copy_(bounds)


def _reset() -> None:
    """Set the lowest and highest looked-up ids to valid ids, in place, because CUDA graphs write to their memory."""
    for (_, rows), seen in _seen.items():
        seen[:1].fill_(0)
        seen[1:].fill_(rows - 1)


def forget() -> None:
    """Free the memory of the lowest and highest looked-up ids. CUDA graphs that write to it must not run afterwards."""
    _seen.clear()
    _snapshot.clear()
