"""What lies where in the arena, the memory that the ranks of one group share.

| bytes | what |
| --- | --- |
| 0 … 4096 | header: magic, world size, slot and one-shot bytes, spin, abort and cancel words, the parent's reason |
| 1024 per rank | line: counter, two signatures, the rank's abort reason |
| two slots per rank, from the next page on | what a rank contributes to even and to odd steps |

`_kernel_protocol.h` repeats these numbers, and proves there why two slots suffice. All words are 8 bytes,
aligned, which every 64-bit machine writes whole.
"""

from __future__ import annotations

import mmap

from parallelformers_ng.errors import CollectiveAbortedError, ProtocolError

MAGIC = int.from_bytes(b"PFARENA1", "little")
MAX_WORLD_SIZE = 256
PAGE_BYTES = 4096
HEADER_BYTES = PAGE_BYTES
LINE_BYTES = 1024
SLOT_ALIGNMENT = 64
REASON_OFFSET, REASON_BYTES = 512, 512

# Words, counted in units of 8 bytes, of the header …
MAGIC_WORD, WORLD_SIZE_WORD, SLOT_BYTES_WORD, ONE_SHOT_BYTES_WORD, SPIN_WORD = range(5)
ABORT_WORD, CANCEL_WORD = 16, 32
# … and of a line.
COUNTER_WORD, SIGNATURE_WORD = 0, 1

PARENT = -1
"""Stands for the parent where a rank is expected."""


def slots_offset(world_size: int) -> int:
    """Where the slots begin, in bytes."""
    end = HEADER_BYTES + world_size * LINE_BYTES
    return -(-end // PAGE_BYTES) * PAGE_BYTES


def arena_bytes(world_size: int, slot_bytes: int) -> int:
    """The size of a whole arena, in bytes."""
    return slots_offset(world_size) + 2 * world_size * slot_bytes


class ArenaMap:
    """An arena mapped into this process: its words by name. The parent and every rank hold one.

    Args:
        fd: the arena's file descriptor; it is duplicated, so the caller may close it.
        world_size: the number of ranks that the arena must have been made for.

    Raises:
        ProtocolError: the file is not an arena for `world_size` ranks.
    """

    def __init__(self, fd: int, world_size: int) -> None:
        self.memory = mmap.mmap(fd, 0)
        self.words = memoryview(self.memory).cast("Q")
        self.world_size = world_size
        self.slot_bytes = self.words[SLOT_BYTES_WORD]
        self.may_spin = self.words[SPIN_WORD] != 0
        found = self.words[WORLD_SIZE_WORD]
        fits = len(self.memory) >= arena_bytes(world_size, self.slot_bytes)
        if self.words[MAGIC_WORD] != MAGIC or found != world_size or not fits:
            size = len(self.memory)
            self.close()
            raise ProtocolError(
                f"arena: file descriptor {fd} ({size} bytes, for {found} ranks) is no arena for {world_size} ranks; "
                "pass the `fd` of an Arena made for this group"
            )

    def line(self, rank: int) -> int:
        """The index of the first word of a rank's line."""
        return (HEADER_BYTES + rank * LINE_BYTES) // 8

    def counter(self, rank: int) -> int:
        """The last step that a rank has published."""
        return self.words[self.line(rank) + COUNTER_WORD]

    @property
    def aborted(self) -> bool:
        return self.words[ABORT_WORD] != 0

    @property
    def cancel_sequence(self) -> int:
        return self.words[CANCEL_WORD]

    @cancel_sequence.setter
    def cancel_sequence(self, sequence: int) -> None:
        self.words[CANCEL_WORD] = sequence

    def abort(self, author: int, reason: str) -> None:
        """Makes every rank's present and next collective raise; `author` is a rank or PARENT. The first one counts."""
        if self.aborted:
            return
        start = self._reason_start(author)
        text = reason.encode()[: REASON_BYTES - 1]
        self.memory[start : start + len(text) + 1] = text + b"\0"
        self.words[ABORT_WORD] = author + 2

    def abort_error(self) -> CollectiveAbortedError:
        """The exception that says who aborted and why."""
        author = self.words[ABORT_WORD] - 2
        start = self._reason_start(author)
        # Another process may be writing the text; the abort is certain all the same.
        text = self.memory[start : start + REASON_BYTES].partition(b"\0")[0].decode(errors="replace")
        who = "the parent" if author == PARENT else f"rank {author}"
        return CollectiveAbortedError(f"collective aborted by {who}: {text}")

    def reset(self) -> None:
        """Zeroes the counters, the signatures, the abort word and the cancel word."""
        for rank in range(self.world_size):
            start = self.line(rank)
            for word in (COUNTER_WORD, SIGNATURE_WORD, SIGNATURE_WORD + 1):
                self.words[start + word] = 0
        self.words[CANCEL_WORD] = 0
        self.words[ABORT_WORD] = 0

    def close(self) -> None:
        self.words.release()
        self.memory.close()

    def _reason_start(self, author: int) -> int:
        return REASON_OFFSET if author == PARENT else HEADER_BYTES + author * LINE_BYTES + REASON_OFFSET
