"""Pretends streams: the work of one stream runs in order; two streams have no order without a wait.

All work is computed when it is queued. The module records which streams have read and written each tensor, and how far
each stream has waited for other streams. So a use without a wait for an earlier use is recorded as a fault. A copy to
the host arrives at the host's wait: until then its tensor holds bits of one, which are NaN.

The model follows `streams.py`, `CUDAStream.cpp` and `CUDACachingAllocator.cpp` of torch: see `contract.py`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tests.pretend_cuda.ledger import WAITS, ledger
from tests.pretend_cuda.memory import memory, poison

Marks = dict["Stream", int]
"""Positions reached, by stream."""


_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """A stream of a device.

    Attributes:
        position: number of operations queued on the stream.
        seen: positions of other streams for which the stream has waited.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        index = device if isinstance(device, int) or device is None else torch.device(device).index
        self.device = torch.device("cuda", index or 0)
        self.position = 0
        self.seen: Marks = {}
        _streams.add(self)

    def __enter__(self) -> Stream:
        _thread.stack.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _thread.stack.pop()

    @property
    def marks(self) -> Marks:
        """Return the positions that are reached when all work of this stream is done."""
        return {**self.seen, self: self.position}

    def wait_stream(self, other: Stream) -> None:
        _merge(self.seen, other.marks)

    def wait_event(self, event: Event) -> None:
        _merge(self.seen, event.marks)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        ledger.note(WAITS, "Stream.synchronize")
        order.host_waits(self.marks)

    def query(self) -> bool:
        return True


class Event:
    """An event in a stream. A wait for an event that was never recorded returns at once."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.recorded = False
        self.marks: Marks = {}

    def record(self, stream: Stream | None = None) -> None:
        self.recorded = True
        self.marks = (stream or order.current).marks
        self._launched = ledger.launched
        self._replayed = order.replayed

    def elapsed_time(self, other: Event) -> float:
        """Return the operators of graphs that were replayed between two events: a pretended device has no clock."""
        return float(other._replayed - self._replayed)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or order.current).wait_event(self)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.recorded:
            ledger.wait(self._launched)
            order.host_waits(self.marks)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stack: list[Stream] = []


_thread = _Thread()


class Order:
    """The order in which queued work may run.

    Attributes:
        default: stream with most of the work.
        leaving: for each host storage, positions of copies that read it, and a reference to its tensor.
        replayed: operators of replayed graphs, for `Event.elapsed_time`.
        hangs: whether the device finishes no more work, so that every wait of the host is endless.
        kernel_cost: number of operators that one of the package's kernels counts for.
    """

    def __init__(self) -> None:
        self.replayed = 0
        self.hangs = False
        self.kernel_cost = 1
        self.default = Stream(0)
        self._begun: int | None = None  # position of the default stream at the first use of another stream
        self._done: Marks = {}  # positions that the host has waited for
        self._written: dict[int, tuple[Stream, int]] = {}  # storage → stream and position of the last write
        self._read: dict[int, Marks] = {}  # storage → positions of reads since then
        self._taken: dict[int, Stream] = {}  # storage → stream of its allocation, if not the default one
        self._lent: dict[int, set[Stream]] = {}  # storage → streams passed to record_stream
        self._freed: dict[Stream, Marks] = {}  # stream → uses by other streams of its freed memory
        self._coming: list[tuple[Marks, torch.Tensor, torch.Tensor]] = []
        self.leaving: dict[int, tuple[Marks, weakref.ref[torch.Tensor]]] = {}
        memory.on_free.append(self._forget)
        memory.on_take.append(self._take)

    @property
    def current(self) -> Stream:
        return _thread.stack[-1] if _thread.stack else self.default

    def queued(self, reads: Iterable[int], writes: Iterable[int], what: Any) -> None:
        """Record work on the current stream.

        Args:
            reads, writes: storages that the work reads and writes.
            what: description of the work.
        """
        stream = self.current
        stream.position += 1
        if self._begun is None:
            if stream is self.default:
                return
            self._begun = self.default.position
        for key in reads:
            self._check(self._written.get(key, (self.default, self._begun)), stream, what, "was written")
            self._read.setdefault(key, {})[stream] = stream.position
        for key in writes:
            self._check(self._written.get(key, (self.default, self._begun)), stream, what, "was written")
            for mark in self._read.pop(key, {}).items():
                self._check(mark, stream, what, "is read")
            self._written[key] = stream, stream.position

    def written_long_ago(self, key: int) -> None:
        """Record that the host has waited for the only write to a storage."""
        self._written.setdefault(key, (self.default, 0))

    def lend(self, key: int, stream: Stream) -> None:
        """Keep a freed storage reserved as long as a stream may use it."""
        self._lent.setdefault(key, set()).add(stream)

    def host_waits(self, marks: Marks | None = None) -> None:
        """Record that the host has waited for positions of streams, or, with None, for the whole device."""
        while self.hangs:
            time.sleep(0.01)
        if marks is None:
            marks = self.current.marks
            for stream in list(_streams):
                _merge(marks, stream.marks)
        _merge(self._done, marks)
        for arrival in [*self._coming]:
            due, target, value = arrival
            if all(self._done.get(stream, 0) >= position for stream, position in due.items()):
                self._coming.remove(arrival)
                with torch.inference_mode(target.is_inference()):
                    target.copy_(value)

    def bring(self, value: torch.Tensor) -> torch.Tensor:
        """Return the host tensor in which a value will arrive."""
        target = torch.empty_like(value)
        poison(target)
        self._coming.append(({self.current: self.current.position}, target, value.clone()))
        return target

    def carry_on(self, source: torch.Tensor) -> None:
        """Deliver a value to its host tensor if a copy to a device reads the tensor on a stream that has waited for the
        value.

        The host itself need not have waited.
        """
        for arrival in [each for each in self._coming if each[1].data_ptr() == source.data_ptr()]:
            due, target, value = arrival
            if all(self._is_before(mark, self.current) for mark in due.items()):
                self._coming.remove(arrival)
                with torch.inference_mode(target.is_inference()):
                    target.copy_(value)

    def leave(self, key: int, owner: weakref.ref[torch.Tensor]) -> None:
        """Record a copy from page-locked memory. The host must not change the memory before it has waited for the copy.

        torch keeps unused memory until the copy has completed.
        """
        marks, _ = self.leaving.get(key, ({}, owner))
        self.leaving[key] = {**marks, self.current: self.current.position}, owner

    def host_writes(self, key: int, what: Any) -> None:
        """Record a write by the host to its own memory."""
        marks, owner = self.leaving.pop(key, ({}, None))
        late = any(self._done.get(stream, 0) < position for stream, position in marks.items())
        if late and owner is not None and owner() is not None:
            memory.faults.append(f"{what} writes to memory of the host from which a copy may not have left")

    def _check(self, mark: tuple[Stream, int], stream: Stream, what: Any, did: str) -> None:
        if not self._is_before(mark, stream):
            memory.faults.append(f"{what} uses what {did} on another stream, for which its own has not waited")

    def _is_before(self, mark: tuple[Stream, int], stream: Stream) -> bool:
        other, position = mark
        return other is stream or max(stream.seen.get(other, 0), self._done.get(other, 0)) >= position

    def _take(self, key: int) -> None:
        stream = self.current
        if stream is not self.default:
            self._taken[key] = stream
        if memory.pool is not None:
            return
        for mark in self._freed.pop(stream, {}).items():
            if not self._is_before(mark, stream):
                memory.faults.append("memory is taken again that another stream may still use: no record_stream")

    def _forget(self, key: int) -> None:
        written, read = self._written.pop(key, None), self._read.pop(key, {})
        stream, lent = self._taken.pop(key, self.default), self._lent.pop(key, set())
        for user, position in [*read.items(), *([written] if written else [])]:
            if user is not stream and user not in lent:
                _merge(self._freed.setdefault(stream, {}), {user: position})


def _merge(marks: Marks, others: Marks) -> None:
    for stream, position in others.items():
        marks[stream] = max(marks.get(stream, 0), position)


Order.__module__ = "torch.cuda"  # its state is the device's, and not a value of the program that ranks must copy
order = Order()
