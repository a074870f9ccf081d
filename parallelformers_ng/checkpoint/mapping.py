"""Files mapped into this process, and what lies at an address of theirs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from dataclasses import dataclass

# Without it the kernel may refuse to map a file larger than its memory, as if every page were to be written to.
_MAP_NORESERVE = 0x4000
FLAGS, ACCESS = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE


@dataclass(frozen=True)
class MappedFile:
    """A file that is mapped whole.

    Attributes:
        start: the address of its first byte.
        size: bytes.
        descriptor: the file.
    """

    start: int
    size: int
    descriptor: int

    @functools.cached_property
    def direct(self) -> int | None:
        """The file, opened to be read past the system's cache of files; None if its file system cannot."""
        with contextlib.suppress(OSError):
            opened = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            weakref.finalize(self, os.close, opened)
            return opened
        return None


_FILES: weakref.WeakKeyDictionary[mmap.mmap, MappedFile] = weakref.WeakKeyDictionary()


def map_file(descriptor: int, size: int = 0) -> mmap.mmap:
    """Map a file copy-on-write. The descriptor may be closed afterwards.

    Args:
        size: bytes, 0 for all that it has.
    """
    mapping = mmap.mmap(descriptor, size, flags=FLAGS, prot=ACCESS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    own = os.dup(descriptor)
    weakref.finalize(mapping, os.close, own)
    _FILES[mapping] = MappedFile(start, len(mapping), own)
    return mapping


def file_at(address: int) -> MappedFile | None:
    """Return the file that `map_file` has mapped there."""
    return next((file for file in _FILES.values() if file.start <= address < file.start + file.size), None)
