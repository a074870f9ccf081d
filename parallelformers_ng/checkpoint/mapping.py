"""Maps files into the memory of this process, and finds the mapped file at an address."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from dataclasses import dataclass

# Without MAP_NORESERVE the kernel may refuse to map a file that is larger than the memory of the machine.
_MAP_NORESERVE = 0x4000
FLAGS, ACCESS = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True)
class MappedFile:
    """A file that is mapped into memory from its beginning.

    Attributes:
        start: address of the first byte.
        size: number of mapped bytes.
        descriptor: file descriptor of the file, open as long as the mapping exists.
    """

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


_FILES: weakref.WeakKeyDictionary[mmap.mmap, MappedFile] = weakref.WeakKeyDictionary()


def map_file(descriptor: int, size: int = 0) -> mmap.mmap:
    """Map a file copy-on-write. The caller may close the descriptor afterwards.

    Changes of the memory do not reach the file. `file_at` finds the mapping as long as it exists.

    Args:
        descriptor: file descriptor, open for reading.
        size: bytes to map from the beginning; 0 for the whole file.

    Raises:
        OSError: the system cannot map the file, or no file descriptor is left.
        ValueError: the file is empty, or has fewer than `size` bytes.
    """
    mapping = mmap.mmap(descriptor, size, flags=FLAGS, prot=ACCESS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    own = os.dup(descriptor)
    weakref.finalize(mapping, os.close, own)
    _FILES[mapping] = MappedFile(start, len(mapping), own)
    return mapping


def file_at(address: int) -> MappedFile | None:
    """Return the file that `map_file` has mapped at an address; None if `map_file` has mapped no file there."""
    return next((file for file in _FILES.values() if file.start <= address < file.start + file.size), None)
