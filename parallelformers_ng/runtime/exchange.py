"""One request and its answers: what a group and its workers say to each other between two turns."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from parallelformers_ng.errors import ChannelClosedError, GroupError, ProtocolError, WorkerError
from parallelformers_ng.runtime import failures
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.processes import Processes, WorkerProcess
from parallelformers_ng.wire.decoder import Frame, Restore
from parallelformers_ng.wire.encoder import Encoded, Packed, pack
from parallelformers_ng.wire.format import Flag, Kind
from parallelformers_ng.wire.interrupts import LetThrough
from parallelformers_ng.wire.transport import LOOKOUT_SECONDS, wait

OnEvent = Callable[[Any], object]

# Looked up once: in Python 3.11, to read one off an enum takes a call.
_REQUEST, _RESULT, _DONE, _ERROR = Kind.REQUEST, Kind.RESULT, Kind.DONE, Kind.ERROR
_ANSWERS = frozenset({_RESULT, _DONE, _ERROR})


class WorkerGoneError(GroupError):
    """A worker ended, or hung up, in the middle of a request. The group makes a WorkerDiedError of it."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"the worker of rank {rank} is gone")
        self.rank = rank


class Exchange:
    """Sends requests to all workers of a group and collects their answers. Not for two threads at once.

    In the main thread its methods are called in a `Held` block: handlers of signals run in the waits alone, and in the
    caller's `on_event`. What those raise leaves an exchange that `finish` takes up again.

    Args:
        processes: the workers, all ready.
        key: the group's; it signs pickles and class names.
        restore: this process's side of `decoder.decode`.
    """

    def __init__(self, processes: Processes, key: bytes, restore: Restore | None) -> None:
        self._processes = processes
        self._key = key
        self._restore = restore
        self._sequence = 0
        self._needs_reset = False
        self.in_event = False  # a caller's on_event is running
        self.unfinished = False  # a request has begun, and some rank has not had it, or not answered it
        self._packed: list[Packed] = []
        self._answers: dict[int, Frame] = {}
        self._looks_out = usable_cpus() > 1
        self._look_until = 0.0
        # Rank 0's answer is waited for first: by then the others have mostly answered, too, and this process need not
        # wake up, on a core that a rank may be using, for each of them. A rank that raises frees rank 0 from the
        # collectives, and the end of any is seen by its pidfd.
        self._first, self._rest = select.poll(), select.poll()
        self._rank_of: dict[int, int] = {}
        for worker in processes.workers:
            for fd in (worker.channel.fileno(), worker.pidfd):
                self._rest.register(fd, select.POLLIN)
                if worker.rank == 0 or fd == worker.pidfd:
                    self._first.register(fd, select.POLLIN)
                self._rank_of[fd] = worker.rank
        self._pidfds = {worker.pidfd for worker in processes.workers}

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
        self._pack(messages, flags)
        failure = self._go_on(deadline, on_event)
        values, error = self._read()
        failure = failure or error
        if failure is not None:
            try:
                raise failure
            finally:
                del failure, error  # the exception holds this frame, which must not hold the exception
        return values

    def finish(self, deadline: float) -> None:
        """After an interrupt: have the workers leave the request, and drop their answers. It can be interrupted again.

        Raises:
            RequestTimeoutError: they had not by the deadline.
            WorkerGoneError, ProtocolError, ChannelClosedError: the group cannot go on.
        """
        self._processes.arena.request_cancel(self._sequence)
        self._go_on(deadline, None)

    def discard(self) -> None:
        """Close the request, and what came with answers that were not read. Due after each that is not unfinished."""
        for packed in self._packed:
            packed.close()
        for frame in self._answers.values():
            frame.discard()
        self._packed, self._answers = [], {}

    def _pack(self, messages: Sequence[Encoded], flags: int) -> None:
        flags |= Flag.RESET if self._needs_reset else 0
        for message in messages:
            self._packed.append(pack(_REQUEST, self._sequence + 1, message, flags))
        if self._needs_reset:
            # All ranks wait for this request, so the collectives can start afresh; its flag has the ranks do so too.
            self._processes.arena.reset()
        self._sequence += 1
        self.unfinished = True

    def _go_on(self, deadline: float, on_event: OnEvent | None) -> BaseException | None:
        """Do what is left to do of a request until every rank has answered it. Returns what `on_event` raised."""
        for worker in self._processes.workers:
            if worker.channel.sent != self._sequence:
                try:
                    worker.channel.send_packed(self._packed[worker.rank % len(self._packed)], deadline)
                except ChannelClosedError:
                    raise WorkerGoneError(worker.rank) from None
        self._look_until = min(time.monotonic() + LOOKOUT_SECONDS, deadline) if self._looks_out else 0.0
        failure = self._collect(deadline, on_event)
        self._needs_reset = any(frame.kind is _ERROR for frame in self._answers.values())
        self.unfinished = False
        return failure

    def _collect(self, deadline: float, on_event: OnEvent | None) -> BaseException | None:
        """Wait until every rank has answered this request. Returns what `on_event` raised."""
        failure: BaseException | None = None
        for due in self._processes.workers:
            while due.rank not in self._answers:
                rank, frame = self._next(due, deadline)
                if frame.kind in _ANSWERS and rank not in self._answers:
                    self._answers[rank] = frame
                elif frame.kind is Kind.EVENT and rank == 0:
                    event = frame.decode(self._key, self._restore)
                    if on_event is not None and failure is None:
                        failure = self._deliver(event, on_event)
                else:
                    frame.discard()
                    raise ProtocolError(f"rank {rank} sent {frame.kind.name} where an answer was due")
        return failure

    def _next(self, due: WorkerProcess, deadline: float) -> tuple[int, Frame]:
        """Wait for the next frame: looking out, for one from `due`; asleep, for anybody's. Returns its rank, and it."""
        rank = due.rank
        try:
            if not due.channel.look_out(self._look_until):
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
            with LetThrough():
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
                values[rank] = frame.decode(self._key, self._restore)
            elif frame.kind is _ERROR:
                raised[rank] = frame.decode(self._key, self._restore)
        if not raised:
            return values, None
        rank = failures.most_informative(raised)
        return values, failures.rebuild(rank, raised[rank])
