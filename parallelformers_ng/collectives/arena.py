"""The memory that the ranks of one group share, and what lies where in it.

| bytes | what |
| --- | --- |
| 0 … 4096 | header: magic, world size, slot and one-shot bytes, spin, abort and cancel words, the parent's reason |
| 1024 per place | line: counter, two signatures, where its last request ended, the rank's abort reason |
| two slots per place, from the next page on | what a rank contributes to even and to odd steps |

Each rank has two places: number `rank` to meet all others, and number world size + `rank` to meet those of its stage.
`_kernel_protocol.h` repeats these numbers, and proves there why two slots suffice. All words are 8 bytes,
aligned, which every 64-bit machine writes whole.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from parallelformers_ng.collectives.control_groups import memory_left
from parallelformers_ng.errors import CollectiveAbortedError, UnsupportedPlatformError

MAGIC = int.from_bytes(b"PFARENA2", "little")
MAX_WORLD_SIZE = 256
PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
LINE_BYTES = 1024
REASON_OFFSET, REASON_BYTES = 512, 512
DEFAULT_SLOT_BYTES = 256 * 1024
DEFAULT_ONE_SHOT_BYTES = 32 * 1024

# Words, counted in units of 8 bytes, of the header …
MAGIC_WORD, WORLD_SIZE_WORD, SLOT_BYTES_WORD, ONE_SHOT_BYTES_WORD, SPIN_WORD = range(5)
ABORT_WORD, CANCEL_WORD = 16, 32
# … and of a line.
COUNTER_WORD, SIGNATURE_WORD, END_WORD = 0, 1, 8

PARENT = -1
"""Stands for the parent where a rank is expected."""


def arena_bytes(world_size: int, slot_bytes: int) -> int:
    """Return the size of a whole arena, in bytes: the slots begin on a page."""
    places = 2 * world_size
    end_of_lines = HEADER_BYTES + places * LINE_BYTES
    return -(-end_of_lines // PAGE_BYTES) * PAGE_BYTES + 2 * places * slot_bytes


class Arena:
    """An arena mapped into this process: its words by name. The parent makes one with `Arena.create`, and each worker
    maps its `fd`.

    It is anonymous memory. Nothing of it has a name in the file system, so nothing can leak; it lives as long as a
    process has it open.

    Args:
        fd: the arena's file descriptor; the mapping does not need it, so the caller may close it.
        world_size: the number of ranks that the arena must have been made for.

    Attributes:
        fd: the descriptor of an arena that this process has made, -1 in other processes. It is close-on-exec.
    """

    fd = -1

    def __init__(self, fd: int, world_size: int) -> None:
        self.memory = mmap.mmap(fd, 0)
        self.words = memoryview(self.memory).cast("Q")
        self.world_size = world_size
        self.slot_bytes = self.words[SLOT_BYTES_WORD]
        self.may_spin = self.words[SPIN_WORD] != 0
        stamp = self.words[MAGIC_WORD], self.words[WORLD_SIZE_WORD]
        assert stamp == (MAGIC, world_size), "the file is no arena for these ranks"

    @classmethod
    def create(
        cls,
        world_size: int,
        slot_bytes: int = DEFAULT_SLOT_BYTES,
        one_shot_bytes: int = DEFAULT_ONE_SHOT_BYTES,
        cpus: int | None = None,
    ) -> Arena:
        """Reserves the memory: four slots per rank and about 2 KiB of words per rank.

        Args:
            world_size: number of ranks, 1 to 256.
            slot_bytes: size of a slot in bytes, a positive multiple of 64. A larger message goes in several rounds.
            one_shot_bytes: with three ranks or more, a sum up to this size in bytes is taken by every rank for
                itself (one round); a larger one is reduce-scattered and gathered (two rounds, less traffic).
            cpus: number of CPUs of all ranks together, by default this process's. If there are fewer CPUs than
                ranks, a waiting rank gives up its CPU at once: a spin would only delay the peer that it waits for.

        Raises:
            ValueError: `world_size` is out of range.
            OSError: the memory cannot be had (ENOSPC), or no file descriptor is left (EMFILE).
            UnsupportedPlatformError: the system does not tell how much memory is available.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"Arena: world_size {world_size} is not between 1 and {MAX_WORLD_SIZE}")
        nbytes, available = arena_bytes(world_size, slot_bytes), available_memory()
        if nbytes > available:
            message = f"Arena: {nbytes} bytes for {world_size} ranks exceed the available memory of {available} bytes"
            raise OSError(errno.ENOSPC, f"{message}; ask for a smaller slot_bytes")
        fd = os.memfd_create("parallelformers_ng.arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Reserved now, a lack of memory is an error here instead of a SIGBUS in some worker later.
            os.posix_fallocate(fd, 0, nbytes)
            # Once it is sealed, no process that has the descriptor can take the memory away from the others.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            may_spin = int((cpus or len(os.sched_getaffinity(0))) >= world_size)
            header = (MAGIC, world_size, slot_bytes, one_shot_bytes, may_spin)
            os.pwrite(fd, b"".join(word.to_bytes(8, "little") for word in header), 0)
            arena = cls(fd, world_size)
            arena.fd = fd
            return arena
        except BaseException:
            os.close(fd)
            raise

    def line(self, place: int) -> int:
        """Return the index of the first word of a place's line."""
        return (HEADER_BYTES + place * LINE_BYTES) // 8

    def counter(self, place: int) -> int:
        """Return the last step that was published there."""
        return self.words[self.line(place) + COUNTER_WORD]

    @property
    def aborted(self) -> bool:
        return self.words[ABORT_WORD] != 0

    @property
    def aborted_by_parent(self) -> bool:
        return self.words[ABORT_WORD] == PARENT + 2

    def note_end(self, place: int, sequence: int, trace: int) -> None:
        """Note that a rank is done with a request, and 32 bits that tell after which collectives."""
        self.words[self.line(place) + END_WORD] = (sequence & 0xFFFFFFFF) << 32 | trace & 0xFFFFFFFF

    def end(self, place: int) -> tuple[int, int]:
        """Return the sequence number, modulo 2³², of the request that a rank was done with last, and those 32 bits."""
        return divmod(self.words[self.line(place) + END_WORD], 1 << 32)

    def request_cancel(self, sequence: int) -> None:
        """Asks for the request with this sequence number (unsigned, 64 bits) to be cancelled; ranks poll for it."""
        self.words[CANCEL_WORD] = sequence

    def abort(self, reason: str = "the group is ending", author: int = PARENT) -> None:
        """Makes every rank's present collective, and all later ones, raise CollectiveAbortedError. The first counts.

        Args:
            author: a rank or PARENT.
        """
        if self.aborted:
            return
        start = self._reason_start(author)
        text = reason.encode()[: REASON_BYTES - 1]
        self.memory[start : start + len(text) + 1] = text + b"\0"
        self.words[ABORT_WORD] = author + 2

    def abort_error(self) -> CollectiveAbortedError:
        """Return the exception that says who aborted and why."""
        author = self.words[ABORT_WORD] - 2
        start = self._reason_start(author)
        # Another process may be writing the text; the abort is certain all the same.
        text = self.memory[start : start + REASON_BYTES].partition(b"\0")[0].decode(errors="replace")
        who = "the parent" if author == PARENT else f"rank {author}"
        return CollectiveAbortedError(f"collective aborted by {who}: {text}")

    def reset(self) -> None:
        """Zeroes the counters, the signatures, the abort word and the cancel word. Legal only while no rank is in a
        collective; every rank then calls `Communicator.reset`."""
        for place in range(2 * self.world_size):
            start = self.line(place)
            for word in (COUNTER_WORD, SIGNATURE_WORD, SIGNATURE_WORD + 1):
                self.words[start + word] = 0
        self.words[CANCEL_WORD] = 0
        self.words[ABORT_WORD] = 0

    def close(self) -> None:
        """Gives up this process's mapping and descriptor; others that have mapped the memory keep it. Idempotent."""
        self.words.release()
        self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _reason_start(self, author: int) -> int:
        return REASON_OFFSET if author == PARENT else HEADER_BYTES + author * LINE_BYTES + REASON_OFFSET


def available_memory() -> int:
    """Return the bytes that can be had without swapping: of the machine, or of this process's control groups if they
    have less.

    The kernel's own tmpfs, which holds memfds, has no limit. A reservation beyond this would not fail: it would wake
    the out-of-memory killer, and that ends other processes first.
    """
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free, left = int(line.split()[1]) * 1024, memory_left()
                return free if left is None else min(free, left)
    raise UnsupportedPlatformError("Arena: /proc/meminfo has no MemAvailable; the workers need Linux 5.3 or later")
