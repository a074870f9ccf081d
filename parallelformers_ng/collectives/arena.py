"""Creates and reads the arena: the memory that the ranks of one host share for collectives.

| bytes | content |
| --- | --- |
| 0 … 4096 | header: magic, world size, slot and one-shot bytes, spin, abort and cancel words, the parent's reason |
| 1024 per place | line: counter, two signatures, end of the last request, the rank's abort reason |
| two slots per place, from the next page on | the rank's data for even steps and for odd steps |

Each rank has two places: number `rank` for collectives of all ranks, and number world size + `rank` for collectives of
its stage. `_kernel_protocol.h` repeats these numbers, and proves why two slots suffice. All words are aligned and have
8 bytes, which every 64-bit machine writes in one step.
"""

from __future__ import annotations

import contextlib
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

# Indices of 8-byte words in the header at the beginning of the arena.
MAGIC_WORD, WORLD_SIZE_WORD, SLOT_BYTES_WORD, ONE_SHOT_BYTES_WORD, SPIN_WORD = range(5)
ABORT_WORD, CANCEL_WORD = 16, 32
# Indices of 8-byte words in a rank's line: the 1024 bytes of the arena that only this rank writes.
COUNTER_WORD, SIGNATURE_WORD, END_WORD = 0, 1, 8

PARENT = -1  # stands for the parent process as the author of an abort; other authors are ranks


class Arena:
    """Shared memory for the collectives of one host's ranks, mapped into this process.

    The parent calls `Arena.create`; each worker maps the file descriptor `fd`. The memory has no name in the file
    system, and the kernel frees it when the last process has closed it.

    Args:
        fd: file descriptor of the arena. The caller may close the descriptor after the call.

    Attributes:
        fd: file descriptor in the process that created the arena, close-on-exec; -1 in other processes.
        may_spin: whether a waiting rank may spin, because there is a CPU for each rank.
    """

    fd = -1

    def __init__(self, fd: int, world_size: int) -> None:
        self.memory = mmap.mmap(fd, 0)
        self.words = memoryview(self.memory).cast("Q")
        self.world_size = world_size
        self.slot_bytes = self.words[SLOT_BYTES_WORD]
        self.may_spin = self.words[SPIN_WORD] != 0
        stamp = self.words[MAGIC_WORD], self.words[WORLD_SIZE_WORD]
        assert stamp == (MAGIC, world_size), f"the file is no arena for {world_size} ranks"

    @classmethod
    def create(
        cls, world_size: int, slot_bytes: int = 256 << 10, one_shot_bytes: int = 32 << 10, cpus: int | None = None
    ) -> Arena:
        """Create an arena, with four slots and 2 KiB of counters and texts for each rank.

        Args:
            slot_bytes: size of a slot in bytes, a positive multiple of 64. A larger message needs several rounds.
            one_shot_bytes: size of the largest tensor, in bytes, that every rank of three or more sums by itself, in
                one round. A larger tensor is reduce-scattered and gathered, in two rounds with less traffic.
            cpus: number of CPUs of all ranks together, by default the CPUs of this process. With fewer CPUs than ranks,
                a waiting rank yields its CPU at once, because spinning would delay a busy rank.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"Arena: world_size {world_size} is not between 1 and {MAX_WORLD_SIZE}")
        places, available = 2 * world_size, available_memory()
        end_of_lines = HEADER_BYTES + places * LINE_BYTES
        nbytes = -(-end_of_lines // PAGE_BYTES) * PAGE_BYTES + 2 * places * slot_bytes  # slots begin at the next page
        if nbytes > available:
            message = f"Arena: {nbytes} bytes for {world_size} ranks exceed the available memory of {available} bytes"
            raise OSError(errno.ENOSPC, f"{message}; ask for a smaller slot_bytes")
        fd = os.memfd_create("parallelformers_ng.arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Without this reservation, a worker that touches a page without free memory would die of SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
            # A process that shrank the file would end all others with SIGBUS, so the size is sealed.
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
        return (HEADER_BYTES + place * LINE_BYTES) // 8

    def counter(self, place: int) -> int:
        return self.words[self.line(place) + COUNTER_WORD]

    def last_collective(self, place: int) -> str:
        """Describe a rank's last collective, for error messages; "" before the first one. `place` is the number of a
        line."""
        operation, detail = divmod(self.words[self.line(place) + SIGNATURE_WORD + self.counter(place) % 2], 1 << 48)
        return {1: f"all_reduce of {detail // 8} numbers", 2: "all_gather"}.get(operation, "")

    @property
    def aborted(self) -> bool:
        return self.words[ABORT_WORD] != 0

    @property
    def aborted_by_parent(self) -> bool:
        return self.words[ABORT_WORD] == PARENT + 2

    def note_end(self, place: int, sequence: int, trace: int) -> None:
        """Record that a rank has ended a request, for the other ranks.

        Args:
            sequence: number of the request.
            trace: 32-bit hash of the rank's collectives in the request.
        """
        self.words[self.line(place) + END_WORD] = (sequence & 0xFFFFFFFF) << 32 | trace & 0xFFFFFFFF

    def end(self, place: int) -> tuple[int, int]:
        """Return the number (modulo 2³²) of the last request that a rank has ended, and its trace: see `note_end`."""
        return divmod(self.words[self.line(place) + END_WORD], 1 << 32)

    def request_cancel(self, sequence: int) -> None:
        self.words[CANCEL_WORD] = sequence

    def abort(self, reason: str = "the group is ending", author: int = PARENT) -> None:
        """Make every rank's current and later collectives raise CollectiveAbortedError. A second abort has no effect.

        Args:
            reason: text of the error, at most 511 bytes in UTF-8; a longer text is cut.
            author: rank that aborts, or PARENT.
        """
        if self.aborted:
            return
        start = self._reason_start(author)
        text = reason.encode()[: REASON_BYTES - 1]
        self.memory[start : start + len(text) + 1] = text + b"\0"
        self.words[ABORT_WORD] = author + 2

    def abort_error(self) -> CollectiveAbortedError:
        """Return an exception that says which process aborted, and why. Call this only after an abort."""
        author = self.words[ABORT_WORD] - 2
        start = self._reason_start(author)
        # The text may be incomplete, and end inside a character, because another process may still be writing it.
        text = self.memory[start : start + REASON_BYTES].partition(b"\0")[0].decode(errors="replace")
        who = "the parent" if author == PARENT else f"rank {author}"
        return CollectiveAbortedError(f"collective aborted by {who}: {text}")

    def reset(self) -> None:
        """Set all counters and the abort and cancel words to zero.

        No rank may be in a collective during the call. Every rank must call `Communicator.reset` afterwards.
        """
        for place in range(2 * self.world_size):
            start = self.line(place)
            for word in (COUNTER_WORD, SIGNATURE_WORD, SIGNATURE_WORD + 1):
                self.words[start + word] = 0
        self.words[CANCEL_WORD] = 0
        self.words[ABORT_WORD] = 0

    def close(self) -> None:
        self.words.release()
        self.memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _reason_start(self, author: int) -> int:
        return REASON_OFFSET if author == PARENT else HEADER_BYTES + author * LINE_BYTES + REASON_OFFSET


def available_memory() -> int:
    """Return the bytes that this process can allocate without swapping, within the limits of its control groups.

    Linux does not limit memfds: a larger reservation would succeed, and the out-of-memory killer would act later.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                free, left = int(line.split()[1]) * 1024, memory_left()
                return free if left is None else min(free, left)
    raise UnsupportedPlatformError(
        "/proc/meminfo reports no available memory; the workers need Linux 5.3 or later, and /proc without subset=pid"
    )
