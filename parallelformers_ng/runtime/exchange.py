"""A request to all ranks, and how the thread of a group has them answer it."""

from __future__ import annotations

import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallelformers_ng.errors import ChannelClosedError, GroupError, ProtocolError, SharedMemoryError, WorkerError
from parallelformers_ng.runtime import failures
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.processes import Processes, Worker
from parallelformers_ng.runtime.worker_process import WorkerGoneError
from parallelformers_ng.wire.frame import Flag, Frame, FrameKind, Packed
from parallelformers_ng.wire.message import Encoded, decode, encode, pack
from parallelformers_ng.wire.transport import SPIN_SECONDS, wait

STRAGGLER_SECONDS = 10.0
"""What workers get to leave a request that its caller gave up, before the group ends."""

# Looked up once: in Python 3.11, to read one off an enum takes a call.
_REQUEST, _RESULT, _DONE, _ERROR = FrameKind.REQUEST, FrameKind.RESULT, FrameKind.DONE, FrameKind.ERROR
_ANSWERS = frozenset({_RESULT, _DONE, _ERROR})

Answers = dict[int, Frame]
"""Rank → its answer, not decoded yet."""


def call_of(method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Encoded:
    """Encode the call of a method, as `Service` takes it. Raises what `encode` raises."""
    return encode({"method": method, "args": args, "kwargs": kwargs or {}})


class Request:
    """A method that every rank runs. Its caller waits here; the thread of the group puts here what comes.

    Args:
        method: name of the method, for messages.
        messages: its arguments: one message for all ranks, or one for each.
        flags: see `Flag`.
        deadline: when all answers must be there, on the clock of `time.monotonic`, in seconds; infinite if it is set
            later.

    Attributes:
        begun: the thread has taken it up.
        given_up: its caller waits no more.
    """

    def __init__(self, method: str, messages: Sequence[Encoded], flags: int = 0, deadline: float = math.inf) -> None:
        self.method, self.messages, self.flags = method, messages, flags
        self.set_deadline(deadline)
        self.begun = self.given_up = False
        self._inbox: queue.SimpleQueue[Frame | Answers | GroupError | None] = queue.SimpleQueue()

    def set_deadline(self, deadline: float) -> None:
        """See above."""
        self.deadline, self.seconds = deadline, deadline - time.monotonic()

    def prepare(self) -> bool:
        """Called in the thread of the group when its turn has come. Returns False if there is nothing to do."""
        return True

    def put(self, news: Frame | Answers | GroupError | None) -> None:
        """Tell the caller an event. The last one is the answers, an error, or None if the group is over."""
        self._inbox.put(news)
        if self.given_up:
            self.discard()

    def next(self) -> Frame | Answers | GroupError | None:
        """Wait for what `put` was given. Ctrl-C and what other handlers of signals raise end the wait.

        Raises:
            queue.Empty: the deadline passed, and the thread had not taken it up.
        """
        if self.begun or self.deadline == math.inf:
            return self._inbox.get()  # the thread keeps to the deadline
        try:
            return self._inbox.get(timeout=min(max(self.deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            if not self.begun:
                raise
            return self._inbox.get()

    def discard(self) -> None:
        """Close the open files in what nobody will take."""
        while not self._inbox.empty():
            try:
                news = self._inbox.get_nowait()
            except queue.Empty:
                return
            frames = [news] if isinstance(news, Frame) else news.values() if isinstance(news, dict) else ()
            for frame in frames:
                frame.discard()


class Exchange:
    """Sends requests to the workers of a group, one at a time, and collects their answers. It belongs to one thread.

    Args:
        processes: the workers, all ready.
        wakeup: an eventfd that is written to have the thread look up.
    """

    def __init__(self, processes: Processes, wakeup: int) -> None:
        self._processes, self._wakeup = processes, wakeup
        self._sequence = 0
        self._needs_reset = False
        self._spins = usable_cpus() > 1
        self._deadline = math.inf
        self._spin_until = 0.0
        self._answers: Answers = {}
        # Rank 0's answer is waited for first: by then the others have mostly answered, too, and this process need not
        # wake up, on a core that a rank may be using, for each of them. A rank that raises frees rank 0 from the
        # collectives, and the end of any is seen by its pidfd.
        self._idle, self._first, self._rest = select.poll(), select.poll(), select.poll()
        self._rank_of: dict[int, int] = {}
        self._pidfds: set[int] = set()
        for poll in (self._idle, self._first, self._rest):
            poll.register(wakeup, select.POLLIN)
        for worker in processes.workers:
            channel = worker.channel.fileno()
            self._rest.register(channel, select.POLLIN)
            if worker.rank == 0:
                self._first.register(channel, select.POLLIN)
            for poll in (self._idle, self._first, self._rest):
                poll.register(worker.pidfd, select.POLLIN)
            self._rank_of |= {channel: worker.rank, worker.pidfd: worker.rank}
            self._pidfds.add(worker.pidfd)

    @property
    def unanswered(self) -> list[int]:
        """Ranks that have not answered the request."""
        return [worker.rank for worker in self._processes.workers if worker.rank not in self._answers]

    def sleep(self) -> None:
        """Wait until somebody writes to the eventfd.

        Raises:
            WorkerGoneError: a worker has ended.
        """
        self._look_up(self._idle, math.inf)

    def run(self, request: Request, when_sent: Callable[[], object]) -> None:
        """Have all ranks run a request, and put what they say into it.

        Args:
            when_sent: called once all ranks have it.

        Raises:
            WorkerGoneError, ChannelClosedError, ProtocolError: the group cannot go on.
            RequestTimeoutError: likewise; `unanswered` says because of whom.
        """
        flags = request.flags | (Flag.RESET if self._needs_reset else 0)
        packed: list[Packed] = []
        self._answers = {}
        try:
            packed.extend(pack(_REQUEST, self._sequence + 1, message, flags) for message in request.messages)
            if self._needs_reset:
                # All ranks wait for this request, so the collectives can start afresh; its flag has ranks do so too.
                self._processes.arena.reset()
            self._sequence += 1
            for worker in self._processes.workers:
                self._send(worker, packed[worker.rank % len(packed)], request.deadline)
            when_sent()
        except SharedMemoryError as error:  # nothing was sent
            request.put(error)
            return
        finally:
            for each in packed:
                each.close()
        try:
            self._collect(request)
        except BaseException:
            for frame in self._answers.values():
                frame.discard()
            raise
        failed = any(frame.kind is _ERROR for frame in self._answers.values())
        self._needs_reset = failed and self._processes.arena.aborted  # else all ranks ended it at the same place
        request.put(self._answers)

    def _send(self, worker: Worker, packed: Packed, deadline: float) -> None:
        try:
            worker.channel.send_packed(packed, deadline)
        except ChannelClosedError:
            raise WorkerGoneError(worker.rank) from None

    def _collect(self, request: Request) -> None:
        self._deadline = request.deadline
        self._spin_until = min(time.monotonic() + SPIN_SECONDS, request.deadline) if self._spins else 0.0
        cancelled = False
        for due in self._processes.workers:
            while due.rank not in self._answers:
                if request.given_up and not cancelled:
                    cancelled = True
                    self._processes.arena.request_cancel(self._sequence)
                    self._deadline = min(self._deadline, time.monotonic() + STRAGGLER_SECONDS)
                rank = due.rank if self._spin_for(due) else self._ready()
                if rank is None:
                    if self._processes.why_over is not None:  # closed by another thread
                        self._processes.kill()
                    continue
                frame = self._receive(rank)
                if frame.kind in _ANSWERS and rank not in self._answers:
                    self._answers[rank] = frame
                elif frame.kind is FrameKind.EVENT and rank == 0:
                    request.put(frame)
                else:
                    frame.discard()
                    raise ProtocolError(f"rank {rank} sent {frame.kind.name} where an answer was due")

    def _spin_for(self, due: Worker) -> bool:
        try:
            return due.channel.spin(self._spin_until)
        except ChannelClosedError:
            raise WorkerGoneError(due.rank) from None

    def _receive(self, rank: int) -> Frame:
        try:
            frame = self._processes.workers[rank].channel.receive(self._deadline)
        except ChannelClosedError:
            raise WorkerGoneError(rank) from None
        if frame.sequence != self._sequence:
            frame.discard()
            raise ProtocolError(f"rank {rank} answered request {frame.sequence}; {self._sequence} was due")
        return frame

    def _ready(self) -> int | None:
        """Sleep until a frame has come. Returns the rank that sent it; None if the thread was woken up instead."""
        for worker in self._processes.workers:
            if worker.channel.has_more:
                return worker.rank
        return self._look_up(self._rest if 0 in self._answers else self._first, self._deadline)

    def _look_up(self, poll: select.poll, deadline: float) -> int | None:
        fds: list[int] = []
        while not fds:
            fds = wait(poll, deadline, "the deadline passed")
        if self._wakeup in fds:
            os.eventfd_read(self._wakeup)
            fds.remove(self._wakeup)
        for fd in fds:
            if fd in self._pidfds:
                raise WorkerGoneError(self._rank_of[fd])
        return self._rank_of[fds[0]] if fds else None


def read(answers: Answers) -> tuple[list[Any], WorkerError | None]:
    """Decode answers.

    Returns:
        The value of each rank, and the exception that explains best what was raised, if any was.

    Raises:
        NotPortableError: an answer cannot be rebuilt here.
    """
    values: list[Any] = [None] * len(answers)
    raised: dict[int, Any] = {}
    try:
        for rank, frame in answers.items():
            if frame.kind is _RESULT:
                values[rank] = decode(frame)
            elif frame.kind is _ERROR:
                raised[rank] = decode(frame)
    finally:
        for frame in answers.values():
            frame.discard()
    if not raised:
        return values, None
    errors = {rank: failures.rebuild(rank, description) for rank, description in raised.items()}
    broken = [error for error in errors.values() if isinstance(error, torch.AcceleratorError)]
    return values, broken[0] if broken else errors[failures.most_informative(raised)]
