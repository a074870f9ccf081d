"""Pages of memory that show files: read ahead and let go, or replaced by copies that the disk writes itself."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from torch import Tensor

from parallelformers_ng.checkpoint.mapping import ACCESS, FLAGS, file_at

_POPULATE_READ, _WILLNEED, _PAGEOUT, _DONTNEED, _HUGEPAGE = 22, 3, 21, 4, 14
_ANYWHERE = FLAGS | mmap.MAP_ANONYMOUS
_THERE, _MOVE_THERE = FLAGS | 0x10, 3  # MAP_FIXED; MREMAP_MAYMOVE | MREMAP_FIXED
_READERS, _PIECE = 4, 4 << 20
"""A disk is at its fastest with several things to read at a time."""
_HUGE = 2 << 20


class Stretch(NamedTuple):
    """Whole pages that follow one another: their address, and their length in bytes."""

    start: int
    length: int


class PageSource(NamedTuple):
    """The file behind pages: the file, the same file opened past the system's cache, the offset, and the end."""

    descriptor: int
    direct: int
    offset: int
    end: int


def stretches(tensors: Iterable[Tensor]) -> Iterator[Stretch]:
    """Yield the pages that tensors lie in, neighbours in one."""
    pages = sorted(
        (tensor.data_ptr() // mmap.PAGESIZE, -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE))
        for tensor in tensors
        if tensor.nbytes
    )
    start, end = 0, 0
    for first, last in pages:
        if first > end:
            if end:
                yield Stretch(start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)
            start = first
        end = max(end, last)
    if end:
        yield Stretch(start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE)


def source_of(stretch: Stretch) -> PageSource | None:
    """Return the file behind pages; None if no file can be read past the system's cache."""
    file = file_at(stretch.start)
    if file is None or file.direct is None:
        return None
    return PageSource(file.descriptor, file.direct, stretch.start - file.start, file.size)


def read_ahead(stretch: Stretch) -> None:
    """Have the system read what pages show, and wait for it."""
    for advice in (_WILLNEED, _POPULATE_READ):  # the second alone would read what lies around, too
        _libc().madvise(*stretch, advice)


def let_go(stretch: Stretch) -> None:
    """Give back the memory of pages that show a file."""
    _libc().madvise(*stretch, _PAGEOUT)  # refused for files of other users, which the system keeps as it likes
    _libc().madvise(*stretch, _DONTNEED)


def replace_by_copies(places: Sequence[tuple[Stretch, PageSource]]) -> None:
    """Read the file into new memory that takes the place of the pages at once: readers see the same numbers at any
    time. The disk writes into that memory itself, and no processor copies.

    Raises:
        OSError: the disk cannot be read, or there is no memory.
    """
    memory: list[int] = []
    try:
        for stretch, _ in places:
            memory.append(_memory_for(stretch))
        reads = [
            _readers().submit(_read, source, done, start, min(_PIECE, stretch.length - done))
            for (stretch, source), start in zip(places, memory, strict=True)
            for done in range(0, stretch.length, _PIECE)
        ]
        wait(reads)  # none may write into memory that is given back
        for each in reads:
            each.result()
        while memory:
            stretch = places[len(memory) - 1][0]
            _checked(_libc().mremap(memory[-1], stretch.length, stretch.length, _MOVE_THERE, stretch.start))
            memory.pop()
    finally:
        for (stretch, _), start in zip(places, memory, strict=False):  # what was not moved
            _libc().munmap(start, stretch.length)


def show_file(stretch: Stretch, source: PageSource) -> None:
    """Have pages show their file again, instead of a copy."""
    _checked(_libc().mmap(*stretch, ACCESS, _THERE, source.descriptor, source.offset))


def _memory_for(stretch: Stretch) -> int:
    """Return memory as long as a stretch, which lies as that does in pages of 2 MB: such pages take the processor a
    fifth of the time that small ones take until they are there, and can be moved whole."""
    size = stretch.length + _HUGE
    start = _checked(_libc().mmap(None, size, ACCESS, _ANYWHERE, -1, 0))
    before = (stretch.start - start) % _HUGE
    if before:
        _libc().munmap(start, before)
    _libc().munmap(start + before + stretch.length, _HUGE - before)
    _libc().madvise(start + before, stretch.length, _HUGEPAGE)
    return int(start + before)


def _read(source: PageSource, skipped: int, start: int, length: int) -> None:
    """Read a piece of the file, `skipped` bytes after the pages' beginning, to the same offset after `start`."""
    offset, end = source.offset + skipped, min(source.offset + skipped + length, source.end)
    while offset < end:  # the rest of the last page is zeros, as in a mapping
        address = start + offset - source.offset
        count = os.preadv(
            source.direct, [(ctypes.c_char * (start + skipped + length - address)).from_address(address)], offset
        )
        if count == 0:
            raise OSError(errno.EIO, "a file with weights has become shorter")
        offset += count


@functools.cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_READERS, "readers")


def _checked(address: int) -> int:
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"weights cannot be brought in: {os.strerror(ctypes.get_errno())}")
    return address


_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    """Through ctypes, which lets other threads of Python run meanwhile."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.madvise.argtypes = [pointer, size, number]
    library.munmap.argtypes = [pointer, size]
    library.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    library.mremap.argtypes = [pointer, size, size, number, pointer]
    library.mmap.restype = library.mremap.restype = pointer
    return library
