"""The worker group: the same method, called on one object per rank, each in a process of its own."""

from __future__ import annotations

import functools
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from parallelformers_ng.collectives.connect import why_unserved
from parallelformers_ng.errors import (
    ChannelClosedError,
    DeadlineExpiredError,
    GroupClosedError,
    GroupError,
    PlacementError,
    ProtocolError,
    RequestTimeoutError,
)
from parallelformers_ng.options import checked_seconds
from parallelformers_ng.runtime import startup
from parallelformers_ng.runtime.deadline import thread_deadline
from parallelformers_ng.runtime.exchange import INTERRUPT_SECONDS, STRAGGLER_SECONDS, Exchange, FairLock, OnEvent
from parallelformers_ng.runtime.processes import Hosts, Processes
from parallelformers_ng.runtime.worker_process import WorkerGoneError
from parallelformers_ng.wire.frame import Flag
from parallelformers_ng.wire.interrupts import CriticalSection, InterruptPoint
from parallelformers_ng.wire.message import Encoded, encode

_GOODBYE_SECONDS = 2.0


class WorkerGroup:
    """`world_size` processes, each with one object, on all of which the same methods run in the same order.

    The target is built in every worker as `Class(rank, world_size, device, communicator, emit)`. Calls from many
    threads are served in the order in which they came. The workers end with `close`, at interpreter exit, and when the
    group is dropped.

    Args:
        world_size: number of workers.
        device: `"cpu"` or `"cuda"`.
        target: `"module:Class"`, importable in a fresh interpreter with this one's `sys.path`.
        device_ids: CUDA device of each rank; by default 0, 1, 2, ….
        backend: of the collectives; `"auto"` picks by device.
        timeout: seconds that a request may take, unless the call says otherwise.
        start_timeout: seconds until every worker must be ready.
        threads: CPU threads of each worker, equal on every rank; by default the available CPUs shared out.
        among: which of how many groups, alike, that share the CPUs.
        hosts: makes what starts the ranks, where they are not to be started by this process, on this machine.
        wait: False returns at once, so that the caller can work while the workers import torch;
            `wait_until_ready` has to come before the first call.

    Attributes:
        device, device_names: "cpu" or "cuda"; the device of each rank: "cpu:0", "cuda:3", ….
        owner: id of the process that started the group; in any other it is of no use.
        hosts: those of the ranks, where others than this process start them.
        user: a weak reference to whom the group serves: see `in_use`.

    Raises:
        StartupError: a worker could not start; the message ends with what it wrote to standard error.
        SharedMemoryError: the system has no memory for the collectives.
        PlacementError: the backend does not serve the devices.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        *,
        target: str,
        device_ids: Sequence[int] | None = None,
        backend: str = "auto",
        timeout: float = 600.0,
        start_timeout: float = 120.0,
        threads: int | None = None,
        among: tuple[int, int] = (0, 1),
        hosts: Callable[[], Hosts] | None = None,
        wait: bool = True,
    ) -> None:
        self.world_size, self.device, self.timeout = world_size, device, timeout
        first, ranks = among[0] * world_size, among[1] * world_size
        self.device_names = [f"{device}:{index}" for index in device_ids or range(first, first + world_size)]
        if reason := why_unserved(backend, device, device_ids):
            raise PlacementError(reason)
        self.user: weakref.ref[Any] | None = None
        self._requests = FairLock()
        self.hosts = None if hosts is None else hosts()
        arena: Any = self.hosts or startup.create_arena(world_size)
        launch = self.hosts.launch if self.hosts else functools.partial(startup.launch, arena=arena)
        self._processes = Processes(arena, self.device_names)
        self.owner, self.check_process = self._processes.owner, self._processes.check_process
        weakref.finalize(self, self._processes.end_unless_busy, self._requests)
        try:
            self._wait: Callable[[], None] | None = launch(
                self._processes,
                target=target,
                device_names=["cpu"] * world_size if device == "cpu" else self.device_names,
                backend=backend,
                timeout=timeout,
                start_timeout=start_timeout,
                threads=threads,
                among=(first, ranks),
            )
        except BaseException:
            self._processes.end()
            raise
        self._exchange = Exchange(self._processes)
        self._deaths = select.epoll()  # many threads may ask at once, which an object of `poll` refuses
        if wait:
            self.wait_until_ready()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait for workers that were started with `wait=False`. Where they are ready, it does nothing.

        Raises:
            StartupError: as the constructor does.
        """
        if self._wait is not None:
            try:
                self._wait()
            except BaseException:
                self._processes.end()
                raise
            self._exchange.watch_workers()
            for worker in self._processes.workers:
                self._deaths.register(worker.pidfd, select.EPOLLIN)
            self._wait = None

    @property
    def in_use(self) -> bool:
        """Whether it serves a model. One that was dropped needs no more."""
        return self.user is not None and self.user() is not None

    @property
    def pids(self) -> list[int]:
        """Process id of each rank, once they are ready."""
        return [worker.pid for worker in self._processes.workers]

    @property
    def alive(self) -> bool:
        """True while requests can be served."""
        return not self._is_over and not self._deaths.poll(0)

    @property
    def ready(self) -> bool:
        """`alive`, and no request was interrupted that workers may still be busy with: `drain` waits for them."""
        return not self._exchange.patient_until and self.alive

    @property
    def busy(self) -> bool:
        """True while a request is served."""
        return self._requests.is_taken

    @property
    def _is_over(self) -> bool:
        return self._processes.ended or self._processes.why_over is not None or os.getpid() != self.owner

    def deadline(self, timeout: float | None = None) -> float:
        """When a call must be done that begins now and may take `timeout` seconds, by default the group's; on the clock
        of `time.monotonic`. The `deadline` of the calling thread counts, where that is earlier."""
        seconds = self.timeout if timeout is None else checked_seconds(timeout, "timeout")
        return min(thread_deadline.get(), time.monotonic() + seconds)

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        on_event: OnEvent | None = None,
        to_devices: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run one method with the same arguments on every rank.

        Args:
            method: a public method of the target.
            *args: its arguments; anything that `message.encode` takes.
            timeout: seconds from now until the answer must be there, the wait for other threads' calls included.
            on_event: called in this thread with each value that rank 0 emits meanwhile. If it raises, the request is
                cancelled and the exception goes on to the caller.
            to_devices: the tensors in the arguments, whatever holds them, arrive on the device of each rank.
            **kwargs: its keyword arguments.

        Returns:
            Rank 0's value.

        Raises:
            WorkerError: the method raised; of the original type as well. After torch.AcceleratorError it is over.
            NotPortableError: an argument cannot be sent; its place is named. Nothing was run.
            WorkerDiedError: a worker ended. The group is of no further use.
            DeadlineExpiredError: the time passed before the request was sent. Nothing was run.
            RequestTimeoutError: the time passed while it ran. The group is of no further use.
            GroupClosedError, WrongProcessError: the group was closed, or belongs to another process.
        """
        request = {"method": method, "args": args, "kwargs": kwargs}
        return self._request(method, [request], Flag.TO_DEVICE if to_devices else 0, timeout, on_event)[0]

    def call_each(
        self,
        method: str,
        per_rank: Iterable[tuple[Any, ...]],
        timeout: float | None = None,
        on_event: OnEvent | None = None,
        to_devices: bool = False,
    ) -> list[Any]:
        """Run one method on every rank, and have the value of each.

        Args:
            method: a public method of the target.
            per_rank: for each rank, the tuple of its arguments; or one tuple for all.
            timeout, on_event, to_devices: as in `call`.

        Returns:
            Each rank's value. Raises what `call` raises.
        """
        requests = [{"method": method, "args": tuple(args), "kwargs": {}} for args in per_rank]
        if len(requests) not in (1, self.world_size):
            raise ValueError(f"{method}: arguments for {len(requests)} ranks, but the group has {self.world_size}")
        flags = Flag.EACH | (Flag.TO_DEVICE if to_devices else 0)
        return self._request(method, requests, flags, timeout, on_event)

    def close(self) -> None:
        """End the workers. Does nothing the second time; calls in flight raise GroupClosedError."""
        if os.getpid() != self.owner:
            return
        text = "the worker group was closed; parallelize the model again to use it"
        self._processes.why_over = self._processes.why_over or functools.partial(GroupClosedError, text)
        if self._requests.is_mine() and self._exchange.in_event:  # the request that is in flight ends the group
            self._processes.kill()
            return
        polite = not self._exchange.patient_until and self._requests.acquire(timeout=0.0)
        if not polite:
            self._processes.kill()
        if polite or self._requests.acquire(timeout=_GOODBYE_SECONDS):
            try:
                if polite and not self._processes.ended and self._wait is None:  # while starting they would not hear
                    self._processes.dismiss(_GOODBYE_SECONDS)
                self._processes.end()
            finally:
                self._requests.release()

    def watch_descriptors(self) -> list[int]:
        """Duplicates of the workers' pidfds, readable once the worker has ended. The caller closes them."""
        return [os.dup(worker.pidfd) for worker in self._processes.workers]

    def end_if_dead(self) -> None:
        """End an idle group of which a worker has died. Where a request is running, it sees so by itself, first."""
        if not self._requests.acquire(_GOODBYE_SECONDS):
            self._processes.kill()  # its caller is busy in on_event
            return
        try:
            dead = [worker.rank for worker in self._processes.workers if worker.has_ended()]
            if dead and not self._is_over:
                self._processes.end_because(WorkerGoneError(dead[0]))
        finally:
            self._requests.release()

    def why_over(self) -> str:
        """Return why the group has ended, "" if it has not."""
        if not self._is_over:
            return ""
        try:
            self._processes.raise_why_over()
        except GroupError as error:
            return str(error)

    def drain(self, deadline: float) -> None:
        """Wait until the workers have left a request that was interrupted. If they do not, the group ends. After
        `deadline`, on the clock of `time.monotonic`, nothing is decided."""
        if self._exchange.patient_until:
            with CriticalSection():
                try:
                    mine = self._requests.acquire(deadline - time.monotonic())
                    if mine and self._exchange.patient_until and not self._is_over:
                        self._leave_interrupted(deadline)
                finally:
                    self._requests.release()

    def _request(
        self, method: str, requests: Sequence[Any], flags: int, timeout: float | None, on_event: OnEvent | None
    ) -> list[Any]:
        if self._is_over:
            self._processes.raise_why_over()
        limit = self.timeout if timeout is None else timeout
        if limit <= 0:
            raise DeadlineExpiredError(f"{method!r} was not sent: its deadline passed {-limit:.3g} s before")
        deadline = time.monotonic() + limit
        with InterruptPoint():
            messages = [encode(request) for request in requests]
        if self._exchange.in_event and self._requests.is_mine():
            raise GroupError(f"{method!r} was called from the on_event of another request; call it when that is done")
        with CriticalSection():
            try:
                if not self._requests.acquire(deadline - time.monotonic()) or time.monotonic() >= deadline:
                    raise DeadlineExpiredError(
                        f"{method!r} did not get its turn within {limit:.3g} s; other calls keep the workers"
                    )
                if self._exchange.patient_until and not self._is_over and not self._leave_interrupted(deadline):
                    raise DeadlineExpiredError(
                        f"{method!r} had to wait for the workers to leave a request that was interrupted, and they"
                        f" did not within {limit:.3g} s"
                    )
                if self._is_over:
                    self._processes.raise_why_over()
                return self._run(messages, flags, method, limit, deadline, on_event)
            finally:
                self._requests.release()

    def _run(
        self, messages: list[Encoded], flags: int, method: str, limit: float, deadline: float, on_event: OnEvent | None
    ) -> list[Any]:
        try:
            return self._exchange.run(messages, flags, deadline, on_event)
        except RequestTimeoutError:
            missing = self._exchange.unanswered
            text = f"{method!r} ran past its deadline of {limit:.3g} s; no answer from ranks {missing}"
            self._processes.end_because(GroupError(f"the worker group was ended, because an earlier request {text}"))
            raise RequestTimeoutError(f"{text}; its workers were ended. Allow more time with timeout=") from None
        except (WorkerGoneError, ChannelClosedError, ProtocolError) as error:
            raise self._processes.end_because(error)() from None
        finally:
            if self._exchange.unfinished and not self._is_over:
                self._abandon()
            else:
                self._exchange.discard()

    def _abandon(self) -> None:
        """After Ctrl-C: have the workers leave the request. Who takes longer is waited for by the next request."""
        begun = time.monotonic()
        self._exchange.patient_until = begun + STRAGGLER_SECONDS
        left = False
        try:
            left = self._leave_interrupted(begun + INTERRUPT_SECONDS)
        finally:
            if not left:
                # Where no request comes, they must not be busy with this one for ever.
                watch = threading.Timer(STRAGGLER_SECONDS, self.drain, [math.inf])
                watch.daemon = True
                watch.start()

    def _leave_interrupted(self, deadline: float) -> bool:
        """Whether the workers have left the interrupted request, or the group has ended because they had not."""
        try:
            return self._exchange.leave(deadline)
        except GroupError as error:
            self._processes.end_because(error)
            return True
