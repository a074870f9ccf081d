"""Defines the worker group: several processes with one object each, on which the same method is called."""

from __future__ import annotations

import math
import os
import queue
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from parallelformers_ng.collectives.connect import why_unserved
from parallelformers_ng.errors import DeadlineExpiredError, GroupClosedError, GroupError, PlacementError, ProtocolError
from parallelformers_ng.option_checks import checked_seconds
from parallelformers_ng.runtime import startup
from parallelformers_ng.runtime.limits import thread_deadline
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.request import Answers, Arguments, Request, call_of, read
from parallelformers_ng.runtime.request_loop import GOODBYE_SECONDS, RequestLoop
from parallelformers_ng.wire.frame import Flag, Frame
from parallelformers_ng.wire.message import decode, encode

OnEvent = Callable[[Any], object] | None
Watch = Callable[[], Any] | None
LOOK_SECONDS = 0.05


class WorkerGroup:
    """A group of worker processes, each with one target object. All workers run the same methods in the same order.

    Every worker builds its target as `Class(rank, world_size, device, communicator, emit)`. Calls from several threads
    are served in the order of their arrival. The workers end after `close`, at interpreter exit, or after the group has
    been garbage-collected.

    Args:
        world_size: number of workers.
        device: `"cpu"` or `"cuda"`.
        target: `"module:Class"`, importable in a fresh interpreter with the `sys.path` of this process.
        imports: name of the module that the fork server imports once for all workers; by default torch, or the module
            of a running fork server.
        device_ids: CUDA device of each rank; by default 0, 1, 2, … for the first group of `among`, and the next numbers
            for the next groups.
        backend: backend of the collectives; `"auto"` chooses by device.
        timeout: maximum duration of a request in seconds; a call can override it.
        start_timeout: maximum time in seconds until all workers are ready.
        threads: CPU threads of each worker, equal on every rank; by default the available CPUs divided by the ranks.
        among: (index of this group, number of equal groups that share the CPUs).
        hosts: function that returns the `Hosts` that start the ranks; None if this process starts the ranks on this
            machine.
        wait: whether to wait until the workers are ready. If `wait` is False, the caller can work while the workers
            import torch, and must call `wait_until_ready` before the first call.

    Attributes:
        world_size, device, timeout: the arguments of the same names.
        device_names: device of each rank, such as "cpu:0" or "cuda:3".
        owner: id of the process that started the group; other processes cannot use the group.
        check_process: function without arguments that raises WrongProcessError in a process other than `owner`.
        hosts: the `Hosts` that started the ranks; None if this process started the ranks.
        environment: the encoded environment variables that the ranks have.
        user: weak reference to the object that uses the group, or None; see `in_use`.
        submit: method of `RequestLoop` that queues a request without waiting for its answers.
        do_later: method of `RequestLoop` that makes the group's thread call a function later.
        wait_until_over: function that waits until the group has ended completely, after one of its workers has died.

    Raises:
        StartupError: a worker could not start; the message ends with the worker's standard error.
        SharedMemoryError: the system has no memory for the collectives.
        PlacementError: the backend does not support the devices, or one host has more than 256 ranks.
        UnsupportedPlatformError: the system does not report its available memory.
        OSError: this process cannot open more files.
    """

    def __init__(
        self,
        world_size: int,
        device: str = "cpu",
        *,
        target: str,
        imports: str | None = None,
        device_ids: Sequence[int] | None = None,
        backend: str = "auto",
        timeout: float = 600.0,
        start_timeout: float = 120.0,
        threads: int | None = None,
        among: tuple[int, int] = (0, 1),
        hosts: Callable[[], Any] | None = None,
        wait: bool = True,
    ) -> None:
        self.world_size, self.device, self.timeout = world_size, device, timeout
        first, ranks = among[0] * world_size, among[1] * world_size
        self.device_names = [f"{device}:{index}" for index in device_ids or range(first, first + world_size)]
        if reason := why_unserved(backend, device, device_ids):
            raise PlacementError(reason)
        self.environment: dict[Any, Any] = {**os.environ._data}  # type: ignore[attr-defined]
        self.user: weakref.ref[Any] | None = None
        self.hosts = None if hosts is None else hosts()
        arena: Any = self.hosts or startup.create_arena(world_size)
        launch = self.hosts.launch if self.hosts else startup.launch
        self._processes = Processes(arena, self.device_names)
        self.owner, self.check_process = self._processes.owner, self._processes.check_process
        self._loop = RequestLoop(self._processes)
        self.submit, self.do_later, self.wait_until_over = self._loop.submit, self._loop.do_later, self._loop.join
        self._in_event: set[int] = set()  # ids of threads that run an `on_event` now, and may not send requests
        weakref.finalize(self, self._loop.leave)
        settings = startup.StartSettings(target, imports, backend, timeout, start_timeout, threads)
        names = ["cpu"] * world_size if device == "cpu" else self.device_names
        try:
            self._wait: Callable[[], None] | None = launch(self._processes, settings, names, (first, ranks))
        except BaseException:
            self._processes.end()
            raise
        self._deaths = select.epoll()  # epoll, because several threads may poll at once, which `select.poll` refuses
        if wait:
            self.wait_until_ready()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait until workers that were started with `wait=False` are ready; return at once if all are ready already.

        Raises:
            StartupError: see the constructor.
            OSError: this process cannot open more files.
        """
        if self._wait is not None:
            try:
                self._wait()
            except BaseException:
                self._processes.end()
                raise
            self._loop.start()
            for worker in self._processes.workers:
                self._deaths.register(worker.pidfd, select.EPOLLIN)
            self._wait = None

    @property
    def in_use(self) -> bool:
        """Whether the group serves a model that still exists."""
        return self.user is not None and self.user() is not None

    @property
    def pids(self) -> list[int]:
        """Process id of each rank on the rank's host, available after the workers are ready."""
        return [worker.pid for worker in self._processes.workers]

    @property
    def alive(self) -> bool:
        """Whether the group can serve requests."""
        return not self._is_over and not self._deaths.poll(0)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._loop.busy

    @property
    def _is_over(self) -> bool:
        return self._processes.ended or self._processes.why_over is not None or os.getpid() != self.owner

    def deadline(self, timeout: float | None = None) -> float:
        """Return the deadline of a call that begins now, in seconds of `time.monotonic`.

        Args:
            timeout: maximum duration in seconds; by default the group's timeout. If the calling thread has an earlier
                `deadline`, the earlier deadline is returned.

        Raises:
            ParallelError: `timeout` is not a positive number.
        """
        seconds = self.timeout if timeout is None else checked_seconds(timeout, "timeout")
        return min(thread_deadline.get(), time.monotonic() + seconds)

    def call(
        self,
        method: str,
        *args: Any,
        deadline: float | None = None,
        on_event: OnEvent = None,
        to_devices: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run one method with the same arguments on every rank.

        Args:
            method: name of a public method of the target, or of an attribute of the target: "caches.run".
            *args: arguments of the method; values of any type that `message.encode` accepts.
            deadline: latest time of the answer in seconds of `time.monotonic`, including the wait for other threads'
                calls; by default `timeout` seconds of the group from now.
            on_event: function that this thread calls with each value that rank 0 emits. If the function raises, the
                request is cancelled and the exception is raised in the caller.
            to_devices: whether tensors in the arguments, also nested ones, are moved to the device of each rank.
            **kwargs: keyword arguments of the method.

        Returns:
            Value that the method returned on rank 0.

        Raises:
            WorkerError: the method raised on a rank; the error is also of the original type. After a
                torch.AcceleratorError the group has ended.
            NotPortableError: an argument cannot be sent; the message names the argument, and nothing was run. Or this
                process cannot rebuild an answer or an event.
            SharedMemoryError: the system has no memory for the message. Nothing was run.
            WorkerDiedError: a worker ended. The group cannot be used any more.
            DeadlineExpiredError: the deadline passed before the request was sent. Nothing was run.
            RequestTimeoutError: the deadline passed while the request ran. The group cannot be used any more.
            GroupClosedError: the group was closed.
            ProtocolError: a worker sent a malformed answer. The group has ended.
            GroupError: this thread is running an `on_event` of the group, or the group has ended for another reason.
            WrongProcessError: another process started the group.
        """
        flags = Flag.TO_DEVICE if to_devices else 0
        return self._request(method, [(args, kwargs)], flags, deadline, on_event, None)[0]

    def call_each(
        self,
        method: str,
        per_rank: Iterable[tuple[Any, ...]],
        deadline: float | None = None,
        on_event: OnEvent = None,
        to_devices: bool = False,
        watch: Watch = None,
    ) -> list[Any]:
        """Run one method on every rank, and return the value of each rank.

        Args:
            method: name of a public method of the target, or of an attribute of the target: "caches.run".
            per_rank: tuple of arguments for each rank; or a single tuple for all ranks.
            deadline, on_event, to_devices: the same as in `call`.
            watch: function that this thread calls 20 times a second, and that returns an update for the ranks or None.

        Returns:
            List with the value of each rank.

        Raises:
            ValueError: `per_rank` has the wrong length.
            GroupError: the same subclasses as of `call`, for the same reasons.
        """
        arguments = [(tuple(args), dict[str, Any]()) for args in per_rank]
        if len(arguments) not in (1, self.world_size):
            raise ValueError(f"{method}: arguments for {len(arguments)} ranks, but the group has {self.world_size}")
        flags = Flag.EACH | (Flag.TO_DEVICE if to_devices else 0)
        return self._request(method, arguments, flags, deadline, on_event, watch)

    def close(self) -> None:
        """End the workers; running calls raise GroupClosedError. Idempotent.

        Idle workers get 2 s to exit by themselves. In a process that did not start the group, nothing happens.
        """
        if os.getpid() != self.owner:
            return
        text = "the worker group was closed; parallelize the model again to use it"
        self._end_because(GroupClosedError(text), GOODBYE_SECONDS)

    def error(self) -> GroupError:
        """Return the reason why the group has ended, as an error to raise."""
        why = self._processes.why_over
        return GroupClosedError("the worker group has ended") if why is None else why()

    def _request(
        self, method: str, calls: list[Arguments], flags: int, deadline: float | None, on_event: OnEvent, watch: Watch
    ) -> list[Any]:
        if self._is_over:
            self._processes.raise_why_over()
        now = time.monotonic()
        deadline = now + self.timeout if deadline is None else deadline
        if deadline <= now:
            raise DeadlineExpiredError(f"{method!r} was not sent: its deadline passed {now - deadline:.3g} s ago")
        if threading.get_ident() in self._in_event:
            raise GroupError(f"{method!r} was called from the on_event of another request; call it after that request")
        request = Request(method, [call_of(method, *each) for each in calls], flags, deadline)
        request.arguments = calls[0]
        try:
            self._loop.submit(request)
            values, error = read(self._answers(request, on_event, watch))
        except BaseException as raised:
            self._loop.give_up(request)
            if isinstance(raised, ProtocolError):
                self._end_because(raised)
            raise
        if error is not None:
            if isinstance(error, torch.AcceleratorError):  # all later operations on this device would fail, too
                text = f"the worker group was ended, because the device of rank {error.rank} failed: {error}"
                self._end_because(GroupError(text))
            try:
                raise error
            finally:
                del error  # breaks a reference cycle: the exception refers to this frame
        return values

    def _end_because(self, cause: GroupError, patience: float = 0.0) -> None:
        self._processes.note_reason(cause)
        self._loop.stop(patience)

    def _answers(self, request: Request, on_event: OnEvent, watch: Watch) -> Answers:
        thread = threading.get_ident()
        next_look = math.inf if watch is None else time.monotonic() + LOOK_SECONDS
        while True:
            if watch is not None and (now := time.monotonic()) >= next_look:
                if request.begun and (update := watch()) is not None:
                    self._loop.update(request, encode(update))
                next_look = now + max(LOOK_SECONDS, 10 * (time.monotonic() - now))
            try:
                item = request.next(max(next_look - time.monotonic(), 0.0) if watch is not None else math.inf)
            except queue.Empty:
                continue
            if isinstance(item, Frame):
                event = decode(item)
                if on_event is not None:
                    self._in_event.add(thread)
                    try:
                        on_event(event)
                    finally:
                        self._in_event.discard(thread)
            elif isinstance(item, dict):
                return item
            elif item is None:
                self._processes.raise_why_over()
            else:
                raise item
