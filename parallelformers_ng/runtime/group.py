"""The worker group: the same method, called on one object per rank, each in a process of its own."""

from __future__ import annotations

import functools
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
from parallelformers_ng.options import checked_seconds
from parallelformers_ng.runtime import startup
from parallelformers_ng.runtime.deadline import thread_deadline
from parallelformers_ng.runtime.exchange import Answers, Request, call_of, read
from parallelformers_ng.runtime.processes import Processes, RankStarter
from parallelformers_ng.runtime.request_loop import GOODBYE_SECONDS, RequestLoop, expired
from parallelformers_ng.wire.frame import Flag, Frame
from parallelformers_ng.wire.message import decode

OnEvent = Callable[[Any], object]


class WorkerGroup:
    """`world_size` processes with one object each. All of them run the same methods in the same order.

    The target is built in every worker as `Class(rank, world_size, device, communicator, emit)`. Calls from many
    threads are served in the order in which they came. The workers end with `close`, at interpreter exit, and when the
    group is dropped.

    Args:
        world_size: number of workers.
        device: `"cpu"` or `"cuda"`.
        target: `"module:Class"`, importable in a fresh interpreter with this one's `sys.path`.
        imports: name of a module for the process that forks the workers, imported once for all; by default
            torch, or the module of an earlier group's process.
        device_ids: CUDA device of each rank; by default 0, 1, 2, ….
        backend: backend of the collectives; `"auto"` picks by device.
        timeout: seconds that a request may take, unless the call says otherwise.
        start_timeout: seconds until every worker must be ready.
        threads: CPU threads of each worker, equal on every rank; by default the available CPUs shared out.
        among: number of this group, and number of equal groups, that share the CPUs.
        hosts: makes the starter of the ranks, if this process does not start them on this machine.
        wait: False returns at once, so that the caller can work while the workers import torch;
            `wait_until_ready` has to come before the first call.

    Attributes:
        device, device_names: "cpu" or "cuda"; the device of each rank: "cpu:0", "cuda:3", ….
        owner: id of the process that started the group; in any other it is of no use.
        hosts: starter of the ranks, if this process does not start them.
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
        imports: str | None = None,
        device_ids: Sequence[int] | None = None,
        backend: str = "auto",
        timeout: float = 600.0,
        start_timeout: float = 120.0,
        threads: int | None = None,
        among: tuple[int, int] = (0, 1),
        hosts: Callable[[], RankStarter] | None = None,
        wait: bool = True,
    ) -> None:
        self.world_size, self.device, self.timeout = world_size, device, timeout
        first, ranks = among[0] * world_size, among[1] * world_size
        self.device_names = [f"{device}:{index}" for index in device_ids or range(first, first + world_size)]
        if reason := why_unserved(backend, device, device_ids):
            raise PlacementError(reason)
        self.user: weakref.ref[Any] | None = None
        self.hosts = None if hosts is None else hosts()
        arena: Any = self.hosts or startup.create_arena(world_size)
        launch = self.hosts.launch if self.hosts else functools.partial(startup.launch, arena=arena)
        self._processes = Processes(arena, self.device_names)
        self.owner, self.check_process = self._processes.owner, self._processes.check_process
        self._loop = RequestLoop(self._processes)
        self._in_event: set[int] = set()  # threads that run an on_event
        weakref.finalize(self, self._loop.leave)
        try:
            self._wait: Callable[[], None] | None = launch(
                self._processes,
                target=target,
                imports=imports,
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
        self._deaths = select.epoll()  # many threads may ask at once, which an object of `poll` refuses
        if wait:
            self.wait_until_ready()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait for workers that were started with `wait=False`. If they are ready, it does nothing.

        Raises:
            StartupError: see the constructor.
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
    def busy(self) -> bool:
        """True while requests wait or are served."""
        return self._loop.busy

    @property
    def _is_over(self) -> bool:
        return self._processes.ended or self._processes.why_over is not None or os.getpid() != self.owner

    def deadline(self, timeout: float | None = None) -> float:
        """Return the deadline of a call that begins now and may take `timeout` seconds, by default the group's; on
        the clock of `time.monotonic`. The `deadline` of the calling thread counts if it is earlier."""
        seconds = self.timeout if timeout is None else checked_seconds(timeout, "timeout")
        return min(thread_deadline.get(), time.monotonic() + seconds)

    def call(
        self,
        method: str,
        *args: Any,
        deadline: float | None = None,
        on_event: OnEvent | None = None,
        to_devices: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run one method with the same arguments on every rank.

        Args:
            method: a public method of the target.
            *args: its arguments; anything that `message.encode` takes.
            deadline: time of `time.monotonic` by which the answer must be there, the wait for other threads' calls
                included; by default `timeout` seconds of the group from now.
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
        flags = Flag.TO_DEVICE if to_devices else 0
        return self._request(method, [(args, kwargs)], flags, deadline, on_event)[0]

    def call_each(
        self,
        method: str,
        per_rank: Iterable[tuple[Any, ...]],
        deadline: float | None = None,
        on_event: OnEvent | None = None,
        to_devices: bool = False,
    ) -> list[Any]:
        """Run one method on every rank, and have the value of each.

        Args:
            method: a public method of the target.
            per_rank: for each rank, the tuple of its arguments; or one tuple for all.
            deadline, on_event, to_devices: the same as in `call`.

        Returns:
            Each rank's value. Raises what `call` raises.
        """
        arguments = [(tuple(args), dict[str, Any]()) for args in per_rank]
        if len(arguments) not in (1, self.world_size):
            raise ValueError(f"{method}: arguments for {len(arguments)} ranks, but the group has {self.world_size}")
        flags = Flag.EACH | (Flag.TO_DEVICE if to_devices else 0)
        return self._request(method, arguments, flags, deadline, on_event)

    def close(self) -> None:
        """End the workers. Does nothing the second time; calls in flight raise GroupClosedError."""
        if os.getpid() != self.owner:
            return
        text = "the worker group was closed; parallelize the model again to use it"
        self._processes.note_reason(GroupClosedError(text))
        self._loop.stop(GOODBYE_SECONDS)

    def watch_descriptors(self) -> list[int]:
        """Duplicates of the workers' pidfds, readable once the worker has ended. The caller closes them."""
        return [os.dup(worker.pidfd) for worker in self._processes.workers]

    def wait_until_over(self) -> None:
        """Wait until a group has ended of which a worker has died."""
        self._loop.join()

    def submit(self, request: Request) -> None:
        """Queue a request whose answers nobody waits for."""
        self._loop.submit(request)

    def do_later(self, function: Callable[[], object]) -> None:
        """Call a function in the group's thread; see `RequestLoop.do_later`."""
        self._loop.do_later(function)

    def error(self) -> GroupError:
        """Return why the group has ended, as an error for whoever waits."""
        why = self._processes.why_over
        return GroupClosedError("the worker group has ended") if why is None else why()

    def why_over(self) -> str:
        """Return why the group has ended, "" if it has not."""
        if not self._is_over:
            return ""
        try:
            self._processes.raise_why_over()
        except GroupError as error:
            return str(error)

    def _request(
        self,
        method: str,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        flags: int,
        deadline: float | None,
        on_event: OnEvent | None,
    ) -> list[Any]:
        if self._is_over:
            self._processes.raise_why_over()
        now = time.monotonic()
        deadline = now + self.timeout if deadline is None else deadline
        if deadline <= now:
            raise DeadlineExpiredError(f"{method!r} was not sent: its deadline passed {now - deadline:.3g} s before")
        if threading.get_ident() in self._in_event:
            raise GroupError(f"{method!r} was called from the on_event of another request; call it when that is done")
        messages = [call_of(method, args, kwargs) for args, kwargs in arguments]
        request = Request(method, messages, flags, deadline)
        try:
            self._loop.submit(request)
            values, error = read(self._answers(request, on_event))
        except BaseException as raised:
            self._loop.give_up(request)
            if isinstance(raised, ProtocolError):
                self._end_because(raised)
            raise
        if error is not None:
            if isinstance(error, torch.AcceleratorError):  # its process fails at everything from now on
                text = f"the worker group was ended, because the device of rank {error.rank} failed: {error}"
                self._end_because(GroupError(text))
            try:
                raise error
            finally:
                del error  # the exception refers to this frame, which must not refer to the exception
        return values

    def _end_because(self, cause: GroupError) -> None:
        self._processes.note_reason(cause)
        self._loop.stop()

    def _answers(self, request: Request, on_event: OnEvent | None) -> Answers:
        """Wait for the answers of all ranks, and pass on meanwhile what rank 0 emits."""
        while True:
            try:
                news = request.next()
            except queue.Empty:
                raise expired(request) from None
            if isinstance(news, Frame):
                event = decode(news)
                if on_event is not None:
                    self._tell(on_event, event)
            elif isinstance(news, dict):
                return news
            elif news is None:
                self._processes.raise_why_over()
            else:
                raise news

    def _tell(self, on_event: OnEvent, event: Any) -> None:
        thread = threading.get_ident()
        self._in_event.add(thread)
        try:
            on_event(event)
        finally:
            self._in_event.discard(thread)
