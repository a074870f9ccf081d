"""One request at a time and its answers: what a group and its workers say to each other."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallelformers_ng.errors import ChannelClosedError, GroupError, ProtocolError, RequestTimeoutError, WorkerError
from parallelformers_ng.runtime import failures
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.processes import Processes, Worker
from parallelformers_ng.runtime.worker_process import WorkerGoneError
from parallelformers_ng.wire.frame import Flag, Frame, Kind, Packed
from parallelformers_ng.wire.interrupts import InterruptPoint
from parallelformers_ng.wire.message import Encoded, decode, pack
from parallelformers_ng.wire.transport import SPIN_SECONDS, wait

OnEvent = Callable[[Any], object]

INTERRUPT_SECONDS = 0.5  # between Ctrl-C and its KeyboardInterrupt, while workers leave the request
STRAGGLER_SECONDS = 10.0  # what they get in all, before the group ends

# Looked up once: in Python 3.11, to read one off an enum takes a call.
_REQUEST, _RESULT, _DONE, _ERROR = Kind.REQUEST, Kind.RESULT, Kind.DONE, Kind.ERROR
_ANSWERS = frozenset({_RESULT, _DONE, _ERROR})


class FairLock:
    """A lock that threads get in the order in which they asked for it: `threading.Lock` lets late callers overtake.

    A signal can interrupt the wait, and nothing else where the caller is in a `CriticalSection`. The lock belongs to
    its next thread from the moment it is passed on, so a thread that was interrupted releases it all the same.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiting: deque[tuple[threading.Lock, int]] = deque()
        self._owner: int | None = None

    @property
    def is_taken(self) -> bool:
        """True while any thread has it."""
        return self._owner is not None

    def is_mine(self) -> bool:
        """True where the calling thread has the lock."""
        return self._owner == threading.get_ident()

    def acquire(self, timeout: float) -> bool:
        """Wait for the lock; a thread that has it already need not wait.

        Args:
            timeout: seconds; may be infinite.

        Returns:
            False where the time passed first.
        """
        me = threading.get_ident()
        with self._mutex:
            if self._owner in (None, me):
                self._owner = me
                return True
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append((gate, me))
        try:
            with InterruptPoint():
                gate.acquire(timeout=min(max(timeout, 0.0), threading.TIMEOUT_MAX))
        finally:
            with self._mutex:
                if (gate, me) in self._waiting:
                    self._waiting.remove((gate, me))
        # A thread may have become the owner at the very moment at which its time was up.
        return self.is_mine()

    def release(self) -> None:
        """Pass the lock on to the thread that has waited longest. Does nothing where it is not the calling thread's."""
        with self._mutex:
            if self._owner != threading.get_ident():
                return
            if self._waiting:
                gate, self._owner = self._waiting.popleft()
                gate.release()
            else:
                self._owner = None


class Exchange:
    """Sends requests to all workers of a group and collects their answers. Not for two threads at once.

    In the main thread its methods are called in a `CriticalSection`: handlers of signals run in the waits alone, and in
    the caller's `on_event`. What those raise leaves an exchange that `leave` takes up again.

    Args:
        processes: the workers, all ready.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._sequence = 0
        self._needs_reset = False
        self.patient_until = 0.0  # with workers that are still busy with a request that was interrupted; 0: none is
        self.in_event = False  # a caller's on_event is running
        self.unfinished = False  # a request has begun, and some rank has not had it, or not answered it
        self._packed: list[Packed] = []
        self._answers: dict[int, Frame] = {}
        self._spins = usable_cpus() > 1
        self._spin_until = 0.0
        # Rank 0's answer is waited for first: by then the others have mostly answered, too, and this process need not
        # wake up, on a core that a rank may be using, for each of them. A rank that raises frees rank 0 from the
        # collectives, and the end of any is seen by its pidfd.
        self._first, self._rest = select.poll(), select.poll()
        self._rank_of: dict[int, int] = {}
        self._pidfds: set[int] = set()

    def watch_workers(self) -> None:
        """Take up the workers, once each has a process."""
        for worker in self._processes.workers:
            for fd in (worker.channel.fileno(), worker.pidfd):
                self._rest.register(fd, select.POLLIN)
                if worker.rank == 0 or fd == worker.pidfd:
                    self._first.register(fd, select.POLLIN)
                self._rank_of[fd] = worker.rank
            self._pidfds.add(worker.pidfd)

    @property
    def unanswered(self) -> list[int]:
        """Ranks that have not answered the request."""
        return [worker.rank for worker in self._processes.workers if worker.rank not in self._answers]

    def run(self, messages: Sequence[Encoded], flags: int, deadline: float, on_event: OnEvent | None) -> list[Any]:
        """Send a request and wait for the answers of all ranks.

        Args:
            messages: one for all ranks, or one for each.
            flags: see `Flag`.
            deadline: on the clock of `time.monotonic`, in seconds.
            on_event: receives what rank 0 emits. If it raises, the request is cancelled.

        Returns:
            The value of each rank.

        Raises:
            SharedMemoryError: the system has no memory for the tensors. Nothing was sent.
            WorkerError, or what `on_event` raised: the exchange is complete.
            NotPortableError: an answer cannot be rebuilt here; the exchange is complete.
            WorkerGoneError, RequestTimeoutError, ProtocolError, ChannelClosedError: the group cannot go on.
        """
        flags |= Flag.RESET if self._needs_reset else 0
        for message in messages:
            self._packed.append(pack(_REQUEST, self._sequence + 1, message, flags))
        if self._needs_reset:
            # All ranks wait for this request, so the collectives can start afresh; its flag has the ranks do so too.
            self._processes.arena.reset()
        self._sequence += 1
        self.unfinished = True
        failure = self._go_on(deadline, on_event)
        values, error = self._read()
        failure = failure or error
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, error  # the exception refers to this frame, which must not refer to the exception
        return values

    def leave(self, deadline: float) -> bool:
        """After an interrupt: have the workers leave the request, and drop their answers. It can be interrupted again.

        Args:
            deadline: on the clock of `time.monotonic`, in seconds. After it, nothing is decided.

        Returns:
            Whether they have left it.

        Raises:
            GroupError: they had time enough, or are gone, or do not keep to the protocol. The group cannot go on.
        """
        patient_until = max(self.patient_until, time.monotonic() + INTERRUPT_SECONDS)  # a late caller polls, too
        self._processes.arena.request_cancel(self._sequence)
        failure: GroupError | None = None
        try:
            self._go_on(min(deadline, patient_until), None)
        except RequestTimeoutError:
            if time.monotonic() < patient_until:
                return False
            failure = GroupError(
                "the worker group was ended: the workers did not leave an interrupted request within"
                f" {STRAGGLER_SECONDS:g} s; parallelize the model again to use it"
            )
        except GroupError as error:
            failure = error
        self.discard()
        self.patient_until = 0.0
        if failure is not None:
            raise failure
        return True

    def discard(self) -> None:
        """Close the request, and what came with answers that were not read. Due after each that is not unfinished."""
        for packed in self._packed:
            packed.close()
        for frame in self._answers.values():
            frame.discard()
        self._packed, self._answers = [], {}

    def _go_on(self, deadline: float, on_event: OnEvent | None) -> BaseException | None:
        """Do what is left to do of a request until every rank has answered it. Returns what `on_event` raised."""
        for worker in self._processes.workers:
            if worker.channel.sent != self._sequence:
                try:
                    worker.channel.send_packed(self._packed[worker.rank % len(self._packed)], deadline)
                except ChannelClosedError:
                    raise WorkerGoneError(worker.rank) from None
        self._spin_until = min(time.monotonic() + SPIN_SECONDS, deadline) if self._spins else 0.0
        failure: BaseException | None = None
        for due in self._processes.workers:
            while due.rank not in self._answers:
                rank, frame = self._next(due, deadline)
                if frame.kind in _ANSWERS and rank not in self._answers:
                    self._answers[rank] = frame
                elif frame.kind is Kind.EVENT and rank == 0:
                    event = decode(frame)
                    if on_event is not None and failure is None:
                        failure = self._deliver(event, on_event)
                else:
                    frame.discard()
                    raise ProtocolError(f"rank {rank} sent {frame.kind.name} where an answer was due")
        failed = any(frame.kind is _ERROR for frame in self._answers.values())
        self._needs_reset = failed and self._processes.arena.aborted  # else all ranks ended it at the same place
        self.unfinished = False
        return failure

    def _next(self, due: Worker, deadline: float) -> tuple[int, Frame]:
        """Wait for the next frame: while spinning, from `due`; asleep, from any rank. Returns its rank, and it."""
        rank = due.rank
        try:
            if not due.channel.spin(self._spin_until):
                rank = self._ready(deadline)
            frame = self._processes.workers[rank].channel.receive(deadline)
        except ChannelClosedError:
            raise WorkerGoneError(rank) from None
        if frame.sequence != self._sequence:
            frame.discard()
            raise ProtocolError(f"rank {rank} answered request {frame.sequence}; {self._sequence} was due")
        return rank, frame

    def _ready(self, deadline: float) -> int:
        """Sleep until a frame has come. Returns the rank that sent it."""
        for worker in self._processes.workers:
            if worker.channel.has_more:
                return worker.rank
        fds: list[int] = []
        while not fds:
            fds = wait(self._rest if 0 in self._answers else self._first, deadline, "the deadline passed")
        for fd in fds:
            if fd in self._pidfds:
                raise WorkerGoneError(self._rank_of[fd])
        return self._rank_of[fds[0]]

    def _deliver(self, event: Any, on_event: OnEvent) -> Exception | None:
        self.in_event = True
        try:
            with InterruptPoint():
                on_event(event)
        except Exception as error:  # whatever it is, the ranks must finish before it goes on
            self._processes.arena.request_cancel(self._sequence)
            return error
        finally:
            self.in_event = False
        return None

    def _read(self) -> tuple[list[Any], WorkerError | None]:
        """The values of the answers, and the exception that explains best what was raised, if any was."""
        values: list[Any] = [None] * len(self._answers)
        raised: dict[int, Any] = {}
        for rank, frame in self._answers.items():
            if frame.kind is _RESULT:
                values[rank] = decode(frame)
            elif frame.kind is _ERROR:
                raised[rank] = decode(frame)
        if not raised:
            return values, None
        errors = {rank: failures.rebuild(rank, description) for rank, description in raised.items()}
        for rank, error in errors.items():
            if isinstance(error, torch.AcceleratorError):  # its process fails at everything from now on
                text = f"the worker group was ended, because the device of rank {rank} failed: {error}"
                self._processes.end_because(GroupError(text))
        return values, errors[failures.most_informative(raised)]
