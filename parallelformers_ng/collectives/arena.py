"""The parent's side of the shared memory."""

from __future__ import annotations

import errno
import fcntl
import os
from types import TracebackType

from parallelformers_ng.collectives import arena_map
from parallelformers_ng.collectives.arena_map import ArenaMap
from parallelformers_ng.errors import UnsupportedPlatformError

DEFAULT_SLOT_BYTES = 256 * 1024
DEFAULT_ONE_SHOT_BYTES = 32 * 1024


class Arena:
    """Anonymous shared memory for one group of ranks, made and owned by the parent.

    Nothing of it has a name in the file system, so nothing can leak; it lives as long as a process has it open.
    Use `Arena.create`; hand `fd` to the workers.
    """

    def __init__(self, fd: int, world_size: int) -> None:
        self._fd = fd
        self._map = ArenaMap(fd, world_size)

    @classmethod
    def create(
        cls,
        world_size: int,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        one_shot_bytes: int = DEFAULT_ONE_SHOT_BYTES,
        cpus: int | None = None,
    ) -> Arena:
        """Reserves the memory: two slots per rank and about 1 KiB of words per rank.

        Args:
            world_size: number of ranks, 1 to 256.
            slot_bytes: size of a slot in bytes, a positive multiple of 64. A larger message goes in several rounds.
            one_shot_bytes: with three ranks or more, a sum up to this size in bytes is taken by every rank for
                itself (one round); a larger one is reduce-scattered and gathered (two rounds, less traffic).
            cpus: how many CPUs the ranks have together, by default this process's. Where they are fewer than the
                ranks, a rank that waits gives its CPU up at once: a spin would only keep off the peer it waits for.

        Raises:
            ValueError: an argument is out of range.
            OSError: the memory cannot be had (ENOSPC), or no file descriptor is left (EMFILE).
            UnsupportedPlatformError: the system has no memfd.
        """
        if not 1 <= world_size <= arena_map.MAX_WORLD_SIZE:
            raise ValueError(f"Arena: world_size {world_size} is not between 1 and {arena_map.MAX_WORLD_SIZE}")
        if slot_bytes < arena_map.SLOT_ALIGNMENT or slot_bytes % arena_map.SLOT_ALIGNMENT:
            raise ValueError(f"Arena: slot_bytes {slot_bytes} is not a positive multiple of {arena_map.SLOT_ALIGNMENT}")
        if one_shot_bytes < 0:
            raise ValueError(f"Arena: one_shot_bytes {one_shot_bytes} is negative")
        if not hasattr(os, "memfd_create"):
            raise UnsupportedPlatformError("Arena: this system has no memfd_create; the workers need Linux")
        nbytes, available = arena_map.arena_bytes(world_size, slot_bytes), available_memory()
        if nbytes > available:
            message = f"Arena: {nbytes} bytes for {world_size} ranks exceed the available memory of {available} bytes"
            raise OSError(errno.ENOSPC, f"{message}; ask for a smaller slot_bytes")
        fd = os.memfd_create("parallelformers_ng.arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserved now, a lack of memory is an error here instead of a SIGBUS in some worker later.
            os.posix_fallocate(fd, 0, nbytes)
            # Sealed, nobody who holds the descriptor can take the memory away below the others.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            may_spin = int((cpus or len(os.sched_getaffinity(0))) >= world_size)
            header = (arena_map.MAGIC, world_size, slot_bytes, one_shot_bytes, may_spin)
            os.pwrite(fd, b"".join(word.to_bytes(8, "little") for word in header), 0)
            return cls(fd, world_size)
        except BaseException:
            os.close(fd)
            raise

    @property
    def fd(self) -> int:
        """The file descriptor to pass to the workers. It is close-on-exec: name it in `pass_fds`."""
        return self._fd

    def abort(self, reason: str = "the group is ending") -> None:
        """Makes all ranks that wait in a collective raise CollectiveAbortedError, and all later collectives as well."""
        self._map.abort(arena_map.PARENT, reason)

    def reset(self) -> None:
        """Makes the arena as new. Legal only while every rank is outside collectives; every rank then calls `reset`."""
        self._map.reset()

    def request_cancel(self, sequence: int) -> None:
        """Asks for the request with this sequence number (unsigned, 64 bits) to be cancelled; ranks poll for it."""
        self._map.cancel_sequence = sequence

    def close(self) -> None:
        """Gives up the parent's mapping and descriptor; ranks that have mapped the memory keep it. Idempotent."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def available_memory() -> int:
    """What can be had without swapping, in bytes.

    The kernel's own tmpfs, where a memfd lives, has no limit: a reservation beyond this would not fail but bring on
    the out-of-memory killer, which ends other processes first.
    """
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise UnsupportedPlatformError("Arena: /proc/meminfo has no MemAvailable; the workers need Linux 5.3 or later")
