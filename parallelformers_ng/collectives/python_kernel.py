"""The kernel of `_kernel.c` without a compiler: the same memory, the same steps, the same bits, but slower.

The protocol and its proof are in `_kernel_protocol.h`. It needs a store to be seen only after the stores before it,
which Python cannot ask for; x86-64 gives it for nothing, other processors do not.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import time
from collections.abc import Callable

import torch
from torch import Tensor

from parallelformers_ng.collectives.arena import (
    COUNTER_WORD,
    MAX_WORLD_SIZE,
    ONE_SHOT_BYTES_WORD,
    SIGNATURE_WORD,
    Arena,
    slots_offset,
)
from parallelformers_ng.collectives.communicator import give_way, sum_in_rank_order

DONE, ABORTED, TIMED_OUT, DIVERGED = 0, 1, 2, 3
ALL_REDUCE, ALL_GATHER, BROADCAST = 1, 2, 3
KINDS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The dtypes that a kernel sums, by the number under which it knows them."""

SEGMENT_ELEMENTS = 32
SPINS = 200

_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}
_DETAIL_MASK = (1 << 48) - 1


def is_supported() -> bool:
    """Whether this processor keeps the stores of one thread in order for all others (x86-64 does)."""
    return platform.machine() in ("x86_64", "AMD64")


def _sign(operation: int, detail: int) -> int:
    return operation << 48 | detail & _DETAIL_MASK


def _bytes_at(address: int, nbytes: int) -> Tensor:
    """The memory at an address, as a uint8 tensor of shape [nbytes]; the caller keeps the memory alive."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


class _Stopped(Exception):
    """A step did not come to its end; carries the status to return."""

    def __init__(self, status: int) -> None:
        self.status = status


def _with_status(collective: Callable[..., None]) -> Callable[..., int]:
    """The status of a collective in the place of the exception."""

    @functools.wraps(collective)
    def run(*arguments: object) -> int:
        try:
            collective(*arguments)
        except _Stopped as stopped:
            return stopped.status
        return DONE

    return run


class PythonKernel:
    """The methods and statuses of `_kernel.Kernel`; addresses are `tensor.data_ptr()`, sizes are in bytes."""

    def __init__(self, arena: Arena, rank: int, timeout: float) -> None:
        self._arena = arena
        self._rank = rank
        self._world_size = world_size = arena.world_size
        self._timeout = timeout
        self._spins = SPINS if arena.may_spin else 0
        self._slot_bytes = arena.slot_bytes
        self._one_shot_bytes = arena.words[ONE_SHOT_BYTES_WORD]
        start = slots_offset(world_size)
        slots = torch.frombuffer(arena.memory, dtype=torch.uint8, offset=start, count=2 * world_size * self._slot_bytes)
        self._slots = slots.view(world_size, 2, self._slot_bytes)

    def close(self) -> None:
        del self._slots

    @_with_status
    def all_reduce(self, address: int, count: int, kind: int) -> None:
        dtype = _DTYPES[kind]
        data = _bytes_at(address, count * dtype.itemsize).view(dtype)
        signature = _sign(ALL_REDUCE, count * 8 + kind)
        limit = self._slot_bytes // dtype.itemsize
        for start in range(0, max(count, 1), limit):
            part = data[start : start + limit]
            one_shot = self._world_size == 2 or part.nbytes <= self._one_shot_bytes
            (self._sum_one_shot if one_shot else self._sum_reduce_scatter)(part, signature)

    @_with_status
    def all_gather(self, source: int, destination: int, outer: int, unit_bytes: int, *sizes: int) -> None:
        rows = [size * unit_bytes for size in sizes]
        detail = outer
        for row in rows:
            detail = detail * 1000003 + row
        own = _bytes_at(source, outer * rows[self._rank])
        out = _bytes_at(destination, outer * sum(rows)).view(outer, sum(rows))
        blocks = [out.new_empty(outer * row) for row in rows]
        for start in range(0, max(outer * max(rows), 1), self._slot_bytes):
            step = self._next_step()
            part = own[start : start + self._slot_bytes]
            self._slot(self._rank, step)[: part.numel()].copy_(part)
            self._exchange(step, _sign(ALL_GATHER, detail))
            for rank, block in enumerate(blocks):
                part = block[start : start + self._slot_bytes]
                part.copy_(self._slot(rank, step)[: part.numel()])
        torch.cat([block.view(outer, row) for block, row in zip(blocks, rows, strict=True)], dim=1, out=out)

    @_with_status
    def broadcast(self, address: int, nbytes: int, src: int) -> None:
        data = _bytes_at(address, nbytes)
        signature = _sign(BROADCAST, nbytes * MAX_WORLD_SIZE + src)
        for start in range(0, max(nbytes, 1), self._slot_bytes):
            step = self._next_step()
            part = data[start : start + self._slot_bytes]
            slot = self._slot(src, step)[: part.numel()]
            if self._rank == src:
                slot.copy_(part)
            self._exchange(step, signature)
            if self._rank != src:
                part.copy_(slot)

    def _sum_one_shot(self, data: Tensor, signature: int) -> None:
        step = self._next_step()
        self._typed_slot(self._rank, step, data).copy_(data)
        self._exchange(step, signature)
        sum_in_rank_order([self._typed_slot(rank, step, data) for rank in range(self._world_size)], out=data)

    def _sum_reduce_scatter(self, data: Tensor, signature: int) -> None:
        lines = -(-data.numel() // SEGMENT_ELEMENTS)
        width = -(-lines // self._world_size) * SEGMENT_ELEMENTS
        segments = [slice(rank * width, (rank + 1) * width) for rank in range(self._world_size)]
        own = segments[self._rank]
        step = self._next_step()
        self._typed_slot(self._rank, step, data).copy_(data)
        self._exchange(step, signature)
        parts = [self._typed_slot(rank, step, data)[own] for rank in range(self._world_size)]
        sum_in_rank_order(parts, out=self._typed_slot(self._rank, step + 1, data)[own])
        self._exchange(step + 1, signature)
        for rank, segment in enumerate(segments):
            data[segment].copy_(self._typed_slot(rank, step + 1, data)[segment])

    def _slot(self, rank: int, step: int) -> Tensor:
        return self._slots[rank, step & 1]

    def _typed_slot(self, rank: int, step: int, like: Tensor) -> Tensor:
        return self._slot(rank, step)[: like.nbytes].view(like.dtype)

    def _next_step(self) -> int:
        if self._arena.aborted:
            raise _Stopped(ABORTED)
        return self._arena.counter(self._rank) + 1

    def _exchange(self, step: int, signature: int) -> None:
        """Publishes `step`, waits until all peers have, and compares what they are doing with what this rank does."""
        arena, words = self._arena, self._arena.words
        line, parity = arena.line(self._rank), SIGNATURE_WORD + (step & 1)
        words[line + parity] = signature
        words[line + COUNTER_WORD] = step
        for peer in range(self._world_size):
            self._wait_until(arena.line(peer) + COUNTER_WORD, step)
        for peer in range(self._world_size):
            if words[arena.line(peer) + parity] != signature:
                raise _Stopped(DIVERGED)

    def _wait_until(self, counter: int, step: int) -> None:
        words = self._arena.words
        for _ in range(self._spins):
            if words[counter] >= step:
                return
        start = time.monotonic()
        while words[counter] < step:
            if self._arena.aborted:
                raise _Stopped(ABORTED)
            waited = time.monotonic() - start
            if waited > self._timeout:
                raise _Stopped(TIMED_OUT)
            give_way(waited)
