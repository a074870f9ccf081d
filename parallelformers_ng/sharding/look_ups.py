"""Makes look-ups of ids on a device safe: without this module, an id beyond the table would end the process.

A CUDA kernel asserts on such an id, and then no CUDA call of its process works. Therefore ids are clamped before the
look-up, and the smallest and largest id are recorded on the device. A request with a bad id fails at its end. No
look-up waits for the device.
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

# (device, rows of a table) → the lowest and the highest id that were looked up in such a table, int64 `[2]`.
_seen: dict[tuple[torch.device, int], torch.Tensor] = {}
_snapshot: dict[tuple[torch.device, int], torch.Tensor] = {}  # copy of `_seen` at the last `hold`

_look_up = functional.embedding


def in_range(ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Return ids on a device, clamped to the rows of a table; record the smallest and the largest id."""
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
    """Make every embedding of this process clamp its ids, from now on, on devices other than the CPU.

    The function replaces `torch.nn.functional.embedding`. Compiled code does not clamp ids, because compiled code sees
    only ids that the model chose.
    """
    functional.embedding = _guarded


@functools.wraps(_look_up)  # so that checks for foreign code find torch's own function
def _guarded(input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # The compiler's later passes run the function on fake tensors, when torch is no longer "compiling".
    if input.device.type != "cpu" and not is_compiling() and not is_fake(input):
        input = in_range(input, weight.shape[0])
    return _look_up(input, weight, *args, **kwargs)


@contextlib.contextmanager
def checked_look_ups(at_end: bool = True) -> Iterator[None]:
    """Run a request in this context, and check the looked-up ids. After an error, the recorded ids are forgotten."""
    try:
        yield
        if at_end:
            check()
    except BaseException:
        _forgive()
        raise


def bounds() -> list[torch.Tensor]:
    """Return the lowest and the highest recorded id of each table, int64 `[2]`, on the device."""
    return [*_seen.values()]


def check(recorded: Sequence[int] | None = None) -> None:
    """Check the ids that were looked up so far."""
    if recorded is None:
        recorded = torch.cat(bounds()).tolist() if _seen else []
    for (_, rows), low, high in zip(_seen, recorded[::2], recorded[1::2], strict=False):  # a table may be new
        check_range(low, high, rows)


def check_range(low: int, high: int, rows: int) -> None:
    """Raise IndexError, with the text of torch's look-ups, if the lowest or the highest id is outside the table."""
    if low < 0 or high >= rows:
        raise IndexError(f"index out of range in self: id {low if low < 0 else high}, vocabulary of {rows}")


def hold() -> None:
    """Save the recorded bounds of ids, so that `take_back` can restore them."""
    for key, seen in _seen.items():
        if key in _snapshot:
            _snapshot[key].copy_(seen)
        else:
            _snapshot[key] = seen.clone()


def take_back() -> None:
    """Restore the recorded bounds of ids from the last `hold`. Bounds of tables first used after `hold` stay."""
    for key, bounds in _snapshot.items():
        _seen[key].copy_(bounds)


def _forgive() -> None:
    """Reset the recorded bounds of ids to valid ids. The bounds keep their memory, because recordings write to that
    memory."""
    for (_, rows), seen in _seen.items():
        seen[:1].fill_(0)
        seen[1:].fill_(rows - 1)


def forget() -> None:
    """Delete the recorded bounds of ids and their memory on the device. No recording may run afterwards."""
    _seen.clear()
    _snapshot.clear()
