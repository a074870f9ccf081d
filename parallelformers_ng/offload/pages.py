"""Reads ahead and frees pages of mapped files, or replaces such pages by copies that are read with direct I/O.

Makes pages huge, too, so that the processor finds their addresses faster.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

from torch import Tensor

from parallelformers_ng.checkpoint.mapping import HUGE_PAGE, MappedFile, checked, file_at, libc, put, reserve

_POPULATE_READ, _WILLNEED, _PAGEOUT, _DONTNEED, _HUGEPAGE, _COLLAPSE = 22, 3, 21, 4, 14, 25
_MOVE_THERE = 3  # MREMAP_MAYMOVE | MREMAP_FIXED, which Python does not define
# A disk is fastest with several reads at a time: this number of threads read, and each read has this number of bytes.
_READERS, _PIECE = 4, 4 << 20


class Stretch(NamedTuple):
    """A contiguous range of whole memory pages: start address, and length in bytes."""

    start: int
    length: int


def stretches(tensors: Iterable[Tensor]) -> list[Stretch]:
    """Return the memory pages of contiguous CPU tensors, as ranges. Adjacent and overlapping ranges are merged."""
    pages = sorted(
        (tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE))
        for tensor in tensors
        if tensor.nbytes
    )
    merged: list[tuple[int, int]] = []
    for first, last in pages:
        if merged and first <= merged[-1][1]:
            first, known = merged.pop()
            last = max(known, last)
        merged.append((first, last))
    return [Stretch(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE) for first, last in merged]


def source_of(stretch: Stretch) -> MappedFile | None:
    """Return the file that is mapped at a range of pages; None without a file that allows direct I/O."""
    file = file_at(stretch.start)
    return None if file is None or file.direct is None else file


def read_ahead(stretch: Stretch) -> None:
    """Make the kernel read a range of mapped pages into memory, and wait until it has done so.

    Errors are ignored. The call waits only on Linux 5.14 or later, which has MADV_POPULATE_READ.
    """
    for advice in (_WILLNEED, _POPULATE_READ):  # without WILLNEED, POPULATE_READ reads more than the range
        libc().madvise(*stretch, advice)


def evict(stretch: Stretch) -> None:
    """Free the memory of a range of mapped pages. Values that were written to them are lost; errors are ignored."""
    libc().madvise(*stretch, _PAGEOUT)  # fails for files of other users, but then the kernel frees the pages later
    libc().madvise(*stretch, _DONTNEED)


def make_huge(tensors: Iterable[Tensor]) -> threading.Thread | None:
    """Replace the memory of CPU tensors by huge pages of 2 MB, in a new thread, because the kernel copies the pages.

    Huge pages cause fewer TLB misses: decode steps of a Llama of 600M take 4 to 10 % less time (measured on a Xeon).
    Needs Linux 6.1 (MADV_COLLAPSE); memory files stay shared. Pages that the kernel cannot replace, for example those
    of most disk files, stay as they are. Returns the thread, or None if no tensor covers a huge page.
    """
    kept = list(tensors)  # the thread needs the tensors' memory, so it keeps the tensors
    whole: list[Stretch] = []
    for start, length in stretches(kept):
        first, end = -(-start // HUGE_PAGE) * HUGE_PAGE, (start + length) // HUGE_PAGE * HUGE_PAGE
        if first < end:
            whole.append(Stretch(first, end - first))
    if not whole:
        return None

    def collapse() -> None:
        for start, length in whole:
            for at in range(start, start + length, _PIECE):  # an error stops one chunk only, not the whole range
                libc().madvise(at, min(_PIECE, start + length - at), _COLLAPSE)
        kept.clear()

    thread = threading.Thread(target=collapse, name="huge pages", daemon=True)
    thread.start()
    return thread


def replace_by_copies(places: Sequence[tuple[Stretch, MappedFile]]) -> None:
    """Replace pages that map files by new memory with the same bytes, read with direct I/O, without CPU copies.

    Each range of pages is replaced atomically, so that other threads always see the same bytes. They are also the same
    after an error.
    """
    memory: list[int] = []
    try:
        for stretch, _ in places:
            # `reserve` gives the memory the offset of `start` within a huge page, so that `mremap` can move huge pages.
            memory.append(reserve(stretch.length, stretch.start))
            libc().madvise(memory[-1], stretch.length, _HUGEPAGE)  # the kernel sets up huge pages five times faster
        reads = [
            _readers().submit(_read, stretch, source, done, start)
            for (stretch, source), start in zip(places, memory, strict=True)
            for done in range(0, stretch.length, _PIECE)
        ]
        wait(reads)  # after an error, no read may still write into memory that is freed below
        for each in reads:
            each.result()
        while memory:
            stretch = places[len(memory) - 1][0]
            checked(libc().mremap(memory[-1], stretch.length, stretch.length, _MOVE_THERE, stretch.start))
            memory.pop()
    finally:
        for (stretch, _), start in zip(places, memory, strict=False):  # only an error leaves memory to free
            libc().munmap(start, stretch.length)


def show_file(stretch: Stretch, source: MappedFile) -> None:
    """Map the file at a range of pages again, in the place of the copy that `replace_by_copies` has made."""
    put(*stretch, source.descriptor, stretch.start - source.start)


def _read(stretch: Stretch, source: MappedFile, skipped: int, start: int) -> None:
    """Read the chunk of the file that begins `skipped` bytes after `stretch.start`, to address `start + skipped`."""
    assert source.direct is not None
    begin, stop = stretch.start - source.start, min(skipped + _PIECE, stretch.length)
    offset, end = begin + skipped, min(begin + stop, source.size)
    while offset < end:  # after the end of the file, a page has zeros, as in a mapped file
        address = start + offset - begin
        room = (ctypes.c_char * (start + stop - address)).from_address(address)
        count = os.preadv(source.direct, [room], offset)
        if count == 0:
            raise OSError(errno.EIO, "a file with weights is shorter than when it was mapped")
        offset += count


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, "readers")
