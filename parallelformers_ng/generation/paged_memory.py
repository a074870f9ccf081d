"""Memory of the rows of a batch on CPU, in pages: address space for long rows, of which only written pages take memory.

The processor's memory management is the block table: a page of 4 KiB is a block of 16 tokens of one head (128 numbers
in bfloat16). Rows of different lengths take the memory of their own tokens, and attention reads each row contiguously.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import mmap
import resource
from collections.abc import Iterable

import torch
from torch import Tensor

_NORESERVE = 0x4000  # MAP_NORESERVE: without it, the system may refuse address space that is larger than the memory
_MIN_ROWS = 16
_MIN_TOKENS = max(1 << 14, mmap.PAGESIZE)
"""Least tokens of a row's address space: a multiple of a page's bytes, so that each head of a row begins a page."""
_SPARE = 4
"""Address space for so many times the columns of the longest row. Half is before its end, for longer rows."""


def may_reserve() -> bool:
    """Whether the system lets a process reserve more address space than it will use."""
    return _overcommits() and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@functools.cache
def _overcommits() -> bool:
    with open("/proc/sys/vm/overcommit_memory") as file:
        return file.read().strip() != "2"


class PagedRows:
    """Keys or values `[rows, heads, tokens, width]` of the rows of a batch. Memory that was not written is 0.

    ::

        address space of a row:   · · · · · · t t t t · · · · ·      · no memory, t tokens in the visible columns

    Args:
        states: keys or values of the first rows. Their first columns may be padding, which is 0.
        rows: most rows.
        columns: number of columns of the longest row.

    Attributes:
        begin: first visible column, which is the first token of the longest row.
        room: column after the last one.

    Raises:
        OSError: the system gives no address space.
    """

    def __init__(self, states: Tensor, rows: int, columns: int) -> None:
        if not may_reserve():
            raise OSError(errno.ENOMEM, "the system limits address space")
        count, heads, tokens, width = states.shape
        self.rows = max(rows, _MIN_ROWS)
        self.room = max(_MIN_TOKENS, 1 << (_SPARE * columns).bit_length())
        end = self.room // 2
        self.begin = end - tokens
        shape = (self.rows, heads, self.room, width)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._space = mmap.mmap(-1, math.prod(shape) * states.itemsize, flags=flags)
        with contextlib.suppress(OSError):  # kernels without huge pages
            self._space.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page holds the columns of several heads
        self._memory = torch.frombuffer(self._space, dtype=states.dtype).view(shape)
        for row in range(count):
            start = _padding_of(states[row])
            self._memory[row, :, self.begin + start : end] = states[row, :, start:]

    def view(self, rows: int, tokens: int) -> Tensor:
        return self._memory[:rows, :, self.begin : self.begin + tokens]

    def fits(self, rows: int, more: int) -> bool:
        """Whether there is room for `rows` rows, and for `more` columns before the visible ones."""
        return rows <= self.rows and more <= self.begin

    def free(self, rows: Iterable[int]) -> None:
        """Return the pages of rows to the system; the rows become 0."""
        size = self._memory.stride(0) * self._memory.itemsize
        for row in rows:
            self._space.madvise(mmap.MADV_DONTNEED, row * size, size)

    def keep(self, rows: list[int], count: int, tokens: int, dropped: int) -> None:
        """Move some of the first `count` rows, in ascending order, to the first places, and hide their first `dropped`
        columns. They have `tokens` columns then."""
        self.begin += dropped
        for place, row in enumerate(rows):
            if place != row:
                self.free([place])
                states = self._memory[row, :, self.begin : self.begin + tokens]
                start = _padding_of(states)
                self._memory[place, :, self.begin + start : self.begin + tokens] = states[:, start:]
        self.free(range(len(rows), count))


def _padding_of(states: Tensor) -> int:
    """Number of first columns of a row, `[heads, tokens, width]`, that are 0."""
    columns = (states != 0).any(-1).any(0)
    return int(columns.to(torch.uint8).argmax()) if columns.any() else len(columns)
