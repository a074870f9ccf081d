"""Runs the thread of a group, which sends the requests of all other threads to the workers, one after another."""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from parallelformers_ng.errors import (
    ChannelClosedError,
    GroupError,
    ProtocolError,
    RequestTimeoutError,
    SharedMemoryError,
)
from parallelformers_ng.runtime import tracebacks
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.request import Answers, Request, described
from parallelformers_ng.runtime.spawn import poll_of
from parallelformers_ng.runtime.worker_process import Worker
from parallelformers_ng.wire.frame import Flag, FrameKind, Packed
from parallelformers_ng.wire.message import Encoded, pack
from parallelformers_ng.wire.transport import SPIN_SECONDS, wait

GOODBYE_SECONDS = 2.0  # seconds that idle workers have to exit after the group was closed
STRAGGLER_SECONDS = 10.0  # seconds that workers have to leave a cancelled request before the group ends

# Read these enum members once, because in Python 3.11 each access costs a function call.
_REQUEST, _ERROR, _EVENT = FrameKind.REQUEST, FrameKind.ERROR, FrameKind.EVENT
_ANSWERS = frozenset({FrameKind.RESULT, FrameKind.DONE, _ERROR})


class RequestLoop:
    """Sends requests to the workers in the order of their arrival, until the group ends. The loop has no reference to
    the `WorkerGroup`, so that the group can be garbage-collected."""

    _partner: Worker  # worker of the latest message; after a ChannelClosedError, the worker that has ended

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._waiting: deque[Request] = deque()
        self._current: Request | None = None
        self._later: list[Callable[[], object]] = []
        self._patience = 0.0
        self._thread = threading.Thread(target=self._run, name="parallelformers_ng-group", daemon=True)
        self._sequence = 0  # number of the current request
        self._needs_reset = False
        self._answers: Answers = {}  # answers to the current request
        self._phase = "running on the ranks"

    def start(self) -> None:
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Any thread may write to the eventfd, so close the eventfd only after this object is freed. Do not close it at
        # interpreter exit, because `leave` still writes to it then.
        weakref.finalize(self, os.close, self._wakeup).atexit = False
        self._spins = usable_cpus() > 1
        # The thread waits for rank 0's answer first: most other ranks have answered by then, so this process does not
        # wake up once per rank, on a core that a rank may be using. A rank that raises aborts the collectives, so that
        # rank 0 answers as well; the end of a worker is seen by its pidfd.
        workers = self._processes.workers
        ends = [self._wakeup, *(each.pidfd for each in workers)]
        channels = [each.channel.fileno() for each in workers]
        self._poll_ends, self._poll_all = poll_of(ends), poll_of([*ends, *channels])
        self._poll_rank_0 = poll_of([*ends, channels[0]])
        self._worker_of = {fd: each for each in workers for fd in (each.pidfd, each.channel.fileno())}
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._current is not None or bool(self._waiting)

    def submit(self, request: Request) -> None:
        """Queue a request; if the group has ended, the request gets None as its last item. Any thread may call this."""
        self._waiting.append(request)
        os.eventfd_write(self._wakeup, 1)
        if self._processes.ended:  # the group's thread may have read the queue for the last time
            self._fail_waiting()

    def do_later(self, function: Callable[[], object]) -> None:
        """Make the group's thread call a function after it has sent the next request, or now if no request waits."""
        self._later.append(function)

    def update(self, request: Request, message: Encoded) -> None:
        """Send a message to all ranks while they run a request. No effect if a rank has answered already."""
        request.updates.append(message)
        os.eventfd_write(self._wakeup, 1)

    def give_up(self, request: Request) -> None:
        """Cancel a request whose caller no longer waits. Ranks stop a running request at their next step."""
        request.given_up = True
        request.discard()
        os.eventfd_write(self._wakeup, 1)

    def stop(self, patience: float = 0.0) -> None:
        """End the workers, and wait for their end. Waiting and running requests get an error."""
        if not self._thread.is_alive():
            self._processes.end()
            return
        self._patience = patience
        os.eventfd_write(self._wakeup, 1)
        self.join()

    def join(self) -> None:
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()

    def leave(self) -> None:
        """End the workers after their group was garbage-collected, or at interpreter exit.

        At interpreter exit a daemon thread may still wait for a request, and must not get an error. Workers that run a
        request are therefore not ended here; the workers end with this process.
        """
        if os.getpid() == self._processes.owner:
            self._processes.ended = True
            if not self.busy:
                self.stop()

    def _fail_waiting(self) -> None:
        with contextlib.suppress(IndexError):  # the queue is empty; other threads may empty it, too
            while True:
                self._waiting.popleft().put(None)

    def _run(self) -> None:
        last: RequestTimeoutError | None = None
        if self._processes.quiet_cpus:
            # Do not share a CPU with a rank that polls actively: a short request would take twice as long.
            with contextlib.suppress(OSError):  # the CPUs may have been taken offline
                os.sched_setaffinity(0, self._processes.quiet_cpus)
        try:
            while self._next():
                self._serve(self._waiting.popleft())
            if self._patience:
                self._processes.dismiss(self._patience)
        except RequestTimeoutError:
            assert self._current is not None, "only a running request can be late"
            last = self._late(self._current)
        except ChannelClosedError:
            self._processes.note_death(self._partner.rank)
        except GroupError as error:
            self._processes.note_reason(error)
        except BaseException as error:
            self._processes.note_reason(GroupError(f"the thread of the group failed: {type(error).__name__}: {error}"))
            raise
        finally:
            self._processes.end()
            if self._current is not None:
                self._current.put(last)
                self._current = None
            self._fail_waiting()
            self._run_later_functions()

    def _next(self) -> bool:
        while self._processes.why_over is None and not self._processes.ended:
            if self._waiting:
                return True
            self._run_later_functions()
            self._sleep(self._poll_ends, math.inf)
        return False

    def _serve(self, request: Request) -> None:
        self._current, request.begun = request, True
        if request.given_up or time.monotonic() >= request.deadline:
            request.put(request.expired())
        elif request.prepare() and self._send(request):
            self._run_later_functions()
            self._collect(request)
        self._current = None  # the request may refer to the group, and would keep it alive

    def _run_later_functions(self) -> None:
        later, self._later = self._later, []
        for function in later:
            function()

    def _send(self, request: Request) -> bool:
        """Send a request to all ranks. Without memory for the messages, give the caller the error and return False."""
        flags = request.flags | (Flag.RESET if self._needs_reset else 0)
        packed: list[Packed] = []
        self._answers = {}
        try:
            packed.extend(pack(_REQUEST, self._sequence + 1, message, flags) for message in request.messages)
            if self._needs_reset:
                # All ranks are idle, so this process can reset the arena; each rank resets its communicator because of
                # `Flag.RESET`.
                self._processes.arena.reset()
            self._sequence += 1
            for worker in self._processes.workers:
                self._partner = worker
                worker.channel.send_packed(packed[worker.rank % len(packed)], request.deadline)
        except SharedMemoryError as error:
            request.put(error)
            return False
        except RequestTimeoutError:
            self._phase = f"being sent to rank {self._partner.rank}"
            raise
        finally:
            for each in packed:
                each.close()
        return True

    def _collect(self, request: Request) -> None:
        """Pass events and answers of the ranks to the request's caller. If the caller has given up, cancel it."""
        deadline = request.deadline
        spin_until = min(time.monotonic() + SPIN_SECONDS, deadline) if self._spins else 0.0
        cancelled = False
        try:
            for due in self._processes.workers:
                while due.rank not in self._answers:
                    if request.given_up and not cancelled:
                        cancelled = True
                        self._processes.arena.request_cancel(self._sequence)
                        deadline = min(deadline, time.monotonic() + STRAGGLER_SECONDS)
                    while request.updates:
                        self._send_update(request, request.updates.popleft(), deadline)
                    self._partner = due
                    worker = due if due.channel.spin(spin_until) else self._ready(deadline)
                    if worker is not None:
                        self._take(request, worker, deadline)
                    elif self._processes.why_over is not None:  # another thread has closed the group
                        self._processes.kill()
        except BaseException:
            for frame in self._answers.values():
                frame.discard()
            raise
        failed = any(frame.kind is _ERROR for frame in self._answers.values())
        # If no rank aborted, all ranks stopped at the same step, and their communicators need no reset.
        self._needs_reset = failed and self._processes.arena.aborted
        request.put(self._answers)

    def _send_update(self, request: Request, message: Encoded, deadline: float) -> None:
        if self._answers:
            return
        packed = pack(FrameKind.UPDATE, self._sequence, message, request.flags & Flag.TO_DEVICE)
        try:
            for worker in self._processes.workers:
                self._partner = worker
                worker.channel.send_packed(packed, deadline)
        finally:
            packed.close()

    def _take(self, request: Request, worker: Worker, deadline: float) -> None:
        """Receive one frame from a worker: its answer, or an event of rank 0."""
        self._partner, rank = worker, worker.rank
        frame = worker.channel.receive(deadline)
        if frame.sequence != self._sequence:
            frame.discard()
            raise ProtocolError(f"rank {rank} answered request {frame.sequence}, not {self._sequence}")
        if frame.kind in _ANSWERS and rank not in self._answers:
            self._answers[rank] = frame
        elif frame.kind is _EVENT and rank == 0:
            request.put(frame)
        else:
            frame.discard()
            raise ProtocolError(f"rank {rank} sent {frame.kind.name} instead of an answer")

    def _ready(self, deadline: float) -> Worker | None:
        """Sleep until a frame arrives, and return the worker that sent it; None if another thread woke this thread."""
        for worker in self._processes.workers:
            if worker.channel.has_more:
                return worker
        return self._sleep(self._poll_all if 0 in self._answers else self._poll_rank_0, deadline)

    def _sleep(self, poll: select.poll, deadline: float) -> Worker | None:
        fds: list[int] = []
        while not fds:
            fds = wait(poll, deadline, "the deadline passed")
        if self._wakeup in fds:
            os.eventfd_read(self._wakeup)
            fds.remove(self._wakeup)
        for fd in fds:
            self._partner = self._worker_of[fd]
            if fd == self._partner.pidfd:
                raise ChannelClosedError(f"the worker of rank {self._partner.rank} has ended")
        return self._worker_of[fds[0]] if fds else None

    def _late(self, request: Request) -> RequestTimeoutError:
        """Record that the group ends because a request is late, and return the error for that request."""
        unanswered = [worker.rank for worker in self._processes.workers if worker.rank not in self._answers]
        text = f"{request.method!r} ran past its deadline of {request.seconds:.3g} s; no answer from ranks {unanswered}"
        why = f"the worker group was ended, because an earlier request {text}"
        if request.given_up:
            why = (
                "the worker group was ended: the workers did not leave an interrupted request within"
                f" {STRAGGLER_SECONDS:g} s; parallelize the model again to use it"
            )
        phase = f"answered by ranks {sorted(self._answers)}" if self._answers else self._phase
        stood = (
            f"The request was {phase}: {described(request.method, *request.arguments)}\n"
            f"{tracebacks.report(self._processes.workers, self._processes.arena)}"
        )
        self._processes.note_reason(GroupError(f"{why}\n{stood}"))
        return RequestTimeoutError(f"{text}; the workers were ended. Allow more time with timeout=\n{stood}")
