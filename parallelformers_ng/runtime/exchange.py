"""Sends a request to all ranks of a group and collects the ranks' answers, in the thread of the group."""

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
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.spawn import poll_of
from parallelformers_ng.runtime.worker_process import Worker
from parallelformers_ng.wire.frame import Flag, Frame, FrameKind, Packed
from parallelformers_ng.wire.message import Encoded, decode, encode, pack
from parallelformers_ng.wire.transport import SPIN_SECONDS, wait

STRAGGLER_SECONDS = 10.0
"""Seconds that workers get to leave a cancelled request before the group is ended."""

# Looked up once, because in Python 3.11 reading an enum member costs a function call.
_REQUEST, _RESULT, _DONE, _ERROR = FrameKind.REQUEST, FrameKind.RESULT, FrameKind.DONE, FrameKind.ERROR
_ANSWERS = frozenset({_RESULT, _DONE, _ERROR})

Answers = dict[int, Frame]
"""Rank → answer frame of the rank, not yet decoded."""


def call_of(method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Encoded:
    """Encode a method call in the form that `Service` decodes.

    Args:
        method: name of a public method of the target.
        args, kwargs: positional arguments, and keyword arguments by name.

    Raises:
        NotPortableError: an argument cannot be sent, see `encode`.
    """
    return encode({"method": method, "args": args, "kwargs": kwargs or {}})


class Request:
    """A method that every rank runs. The caller waits in `next`; the group's thread delivers answers with `put`.

    Args:
        method: name of the method, for error messages.
        messages: encoded arguments: one message for all ranks, or one message per rank.
        flags: flags of the request, see `Flag`.
        deadline: latest time of the answers, in seconds of `time.monotonic`; infinity until `set_deadline` is called.

    Attributes:
        method, messages, flags, deadline: the arguments of the same names.
        seconds: time between setting the deadline and the deadline, in seconds.
        begun: whether the group's thread has started the request.
        given_up: whether the caller no longer waits.
    """

    def __init__(self, method: str, messages: Sequence[Encoded], flags: int = 0, deadline: float = math.inf) -> None:
        self.method, self.messages, self.flags = method, messages, flags
        self.set_deadline(deadline)
        self.begun = self.given_up = False
        self._inbox: queue.SimpleQueue[Frame | Answers | GroupError | None] = queue.SimpleQueue()

    def set_deadline(self, deadline: float) -> None:
        """Set the latest time of the answers, in seconds of `time.monotonic`."""
        self.deadline, self.seconds = deadline, deadline - time.monotonic()

    def prepare(self) -> bool:
        """Return whether to send the request; the group's thread calls this method at the request's turn."""
        return True

    def put(self, item: Frame | Answers | GroupError | None) -> None:
        """Give the caller an event frame, or the last item: the answers, an error, or None if the group ended."""
        self._inbox.put(item)
        if self.given_up:
            self.discard()

    def next(self) -> Frame | Answers | GroupError | None:
        """Wait for the next item of `put` and return it. Ctrl-C and errors from signal handlers end the wait.

        Raises:
            queue.Empty: the deadline passed before the group's thread started the request.
        """
        if self.begun or self.deadline == math.inf:
            return self._inbox.get()  # the group's thread enforces the deadline
        try:
            return self._inbox.get(timeout=min(max(self.deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX))
        except queue.Empty:
            if not self.begun:
                raise
            return self._inbox.get()

    def discard(self) -> None:
        """Close the file descriptors in items that the caller will not read."""
        while not self._inbox.empty():
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            frames = [item] if isinstance(item, Frame) else item.values() if isinstance(item, dict) else ()
            for frame in frames:
                frame.discard()


class Exchange:
    """Sends requests to the workers of a group, one at a time, and collects the answers. Not thread-safe.

    Args:
        processes: the workers, all ready.
        wakeup: eventfd; writing to it wakes the thread.

    Attributes:
        partner: worker with which the thread has exchanged messages last; after a ChannelClosedError, the ended worker.
    """

    partner: Worker

    def __init__(self, processes: Processes, wakeup: int) -> None:
        self._processes, self._wakeup = processes, wakeup
        self._sequence = 0
        self._needs_reset = False
        self._spins = usable_cpus() > 1
        self._deadline = math.inf
        self._spin_until = 0.0
        self._answers: Answers = {}
        # The thread waits for rank 0's answer first: most other ranks have answered by then, so this process does not
        # wake up once per rank, on a core that a rank may be using. A rank that raises aborts the collectives, so that
        # rank 0 answers as well; the end of a worker is seen by its pidfd.
        workers = processes.workers
        ends, channels = [wakeup, *(each.pidfd for each in workers)], [each.channel.fileno() for each in workers]
        self._poll_ends, self._poll_all = poll_of(ends), poll_of([*ends, *channels])
        self._poll_rank_0 = poll_of([*ends, channels[0]])
        self._worker_of = {fd: each for each in workers for fd in (each.pidfd, each.channel.fileno())}

    @property
    def unanswered(self) -> list[int]:
        """Ranks that have not answered the current request yet."""
        return [worker.rank for worker in self._processes.workers if worker.rank not in self._answers]

    def sleep(self) -> None:
        """Wait until another thread writes to the eventfd.

        Raises:
            ChannelClosedError: a worker has ended.
        """
        self._look_up(self._poll_ends, math.inf)

    def run(self, request: Request, when_sent: Callable[[], object]) -> None:
        """Send a request to all ranks, and deliver the ranks' events and answers to the request with `put`.

        If there is no memory for the messages, nothing is sent, and `put` delivers a SharedMemoryError. If the caller
        gives up a running request, the ranks get 10 s to leave the request.

        Args:
            request: the request.
            when_sent: function that is called after the request was sent to all ranks.

        Raises:
            ChannelClosedError: a worker has ended, or has closed its socket; the group cannot continue.
            OSError: this process cannot open more files; the group cannot continue.
            ProtocolError: a worker sent an unexpected frame; the group cannot continue.
            RequestTimeoutError: the deadline passed; `unanswered` lists the late ranks.
        """
        flags = request.flags | (Flag.RESET if self._needs_reset else 0)
        packed: list[Packed] = []
        self._answers = {}
        try:
            packed.extend(pack(_REQUEST, self._sequence + 1, message, flags) for message in request.messages)
            if self._needs_reset:
                # All ranks are idle now, so the arena can be reset. Flag.RESET makes each rank reset its side.
                self._processes.arena.reset()
            self._sequence += 1
            for worker in self._processes.workers:
                self.partner = worker
                worker.channel.send_packed(packed[worker.rank % len(packed)], request.deadline)
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
        self._needs_reset = failed and self._processes.arena.aborted  # otherwise all ranks stopped at the same step
        request.put(self._answers)

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
                self.partner = due
                worker = due if due.channel.spin(self._spin_until) else self._ready()
                if worker is None:
                    if self._processes.why_over is not None:  # closed by another thread
                        self._processes.kill()
                    continue
                self.partner, rank = worker, worker.rank
                frame = worker.channel.receive(self._deadline)
                if frame.sequence != self._sequence:
                    frame.discard()
                    raise ProtocolError(f"rank {rank} answered request {frame.sequence}, not {self._sequence}")
                if frame.kind in _ANSWERS and rank not in self._answers:
                    self._answers[rank] = frame
                elif frame.kind is FrameKind.EVENT and rank == 0:
                    request.put(frame)
                else:
                    frame.discard()
                    raise ProtocolError(f"rank {rank} sent {frame.kind.name} instead of an answer")

    def _ready(self) -> Worker | None:
        """Sleep until a frame arrives, and return the worker that sent it; return None if `wakeup` woke the thread."""
        for worker in self._processes.workers:
            if worker.channel.has_more:
                return worker
        return self._look_up(self._poll_all if 0 in self._answers else self._poll_rank_0, self._deadline)

    def _look_up(self, poll: select.poll, deadline: float) -> Worker | None:
        fds: list[int] = []
        while not fds:
            fds = wait(poll, deadline, "the deadline passed")
        if self._wakeup in fds:
            os.eventfd_read(self._wakeup)
            fds.remove(self._wakeup)
        for fd in fds:
            self.partner = self._worker_of[fd]
            if fd == self.partner.pidfd:
                raise ChannelClosedError(f"the worker of rank {self.partner.rank} has ended")
        return self._worker_of[fds[0]] if fds else None


def read(answers: Answers) -> tuple[list[Any], WorkerError | None]:
    """Decode the answers of all ranks.

    Args:
        answers: rank → answer frame.

    Returns:
        (value of each rank, error): if ranks raised, the exception that best explains the failure; otherwise None.

    Raises:
        NotPortableError: an answer cannot be decoded in this process.
        ProtocolError: an answer is malformed.
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
    # The exception of the lowest rank without an aborted collective explains a failure best.
    return values, broken[0] if broken else errors[min(raised, key=lambda rank: (raised[rank].aborted, rank))]
