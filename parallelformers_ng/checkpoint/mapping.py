"""Maps files into the memory of this process, and finds the mapped file at an address.

A file begins at the start of a huge page, so that the system can put huge pages behind the mapping.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

# Flag MAP_NORESERVE: without it, the kernel may refuse to map a file that is larger than the memory of the machine.
_MAP_NORESERVE = 0x4000
_FLAGS, _ACCESS = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
HUGE_PAGE = 2 << 20
_FAILED = ctypes.c_void_p(-1).value

# A mapped file as a buffer; tensors that `torch.frombuffer` makes from the buffer keep the file mapped.
Mapping = ctypes.Array[ctypes.c_char]


@dataclass(frozen=True)
class MappedFile:
    start: int
    size: int
    descriptor: int

    @functools.cached_property
    def direct(self) -> int | None:
        """File descriptor for reads that bypass the page cache (O_DIRECT); None if the file system has no O_DIRECT."""
        with contextlib.suppress(OSError):
            opened = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            weakref.finalize(self, os.close, opened)
            return opened
        return None


_FILES: dict[int, MappedFile] = {}


def map_file(descriptor: int, size: int = 0) -> Mapping:
    """Map a file copy-on-write, so that writes to the memory do not change the file.

    The caller may close the descriptor afterwards. `file_at` finds the mapping as long as it exists.

    Args:
        size: bytes to map from the beginning; 0 for the whole file.
    """
    present = os.fstat(descriptor).st_size
    size = size or present
    if not 0 < size <= present:
        raise ValueError(f"a file of {present} bytes cannot be mapped for {size} bytes")
    start = reserve(size, 0)
    try:
        put(start, size, descriptor)
        own = os.dup(descriptor)
    except OSError:
        libc().munmap(start, size)
        raise
    mapping = (ctypes.c_char * size).from_address(start)
    _FILES[start] = MappedFile(start, size, own)
    weakref.finalize(mapping, _unmap, start).atexit = False
    return mapping


def _unmap(start: int) -> None:
    file = _FILES.pop(start)
    libc().munmap(start, file.size)
    os.close(file.descriptor)


def reserve(size: int, offset: int) -> int:
    """Map `size` bytes of new memory, and return its address, which is `offset` bytes after a multiple of 2 MB."""
    room = size + HUGE_PAGE
    start = checked(libc().mmap(None, room, _ACCESS, _FLAGS | mmap.MAP_ANONYMOUS, -1, 0))
    before = (offset - start) % HUGE_PAGE
    if before:
        libc().munmap(start, before)
    libc().munmap(start + before + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, HUGE_PAGE - before)
    return start + before


def put(start: int, size: int, descriptor: int, offset: int = 0) -> None:
    """Map a part of a file copy-on-write at address `start`; the mapping replaces the pages that are there."""
    checked(libc().mmap(start, size, _ACCESS, _FLAGS | _MAP_FIXED, descriptor, offset))


def checked(address: int) -> int:
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
    return address


@functools.cache
def libc() -> Any:
    """Return the C library through ctypes, which releases the GIL during each call."""
    library: Any = ctypes.CDLL(None, use_errno=True)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.madvise.argtypes = [pointer, size, number]
    library.munmap.argtypes = [pointer, size]
    library.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_int64]
    library.mremap.argtypes = [pointer, size, size, number, pointer]
    library.mmap.restype = library.mremap.restype = pointer
    return library


def file_at(address: int) -> MappedFile | None:
    return next((file for file in list(_FILES.values()) if file.start <= address < file.start + file.size), None)
