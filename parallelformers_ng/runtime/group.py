"""The worker group: the same method, called on one object per rank, each in a process of its own."""

from __future__ import annotations

import functools
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from parallelformers_ng.errors import (
    ChannelClosedError,
    GroupError,
    ProtocolError,
    RequestTimeoutError,
)
from parallelformers_ng.runtime import deaths, startup
from parallelformers_ng.runtime.cores import usable_cpus
from parallelformers_ng.runtime.exchange import Exchange, OnEvent, WorkerGoneError
from parallelformers_ng.runtime.lifetime import Lifetime
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.turns import Turns
from parallelformers_ng.wire.decoder import Restore
from parallelformers_ng.wire.encoder import Encoded, Replace, encode
from parallelformers_ng.wire.format import Flag
from parallelformers_ng.wire.interrupts import Held, LetThrough

_GOODBYE_SECONDS = 2.0
_INTERRUPT_SECONDS = 0.5  # between Ctrl-C and its KeyboardInterrupt, while workers leave the request
_STRAGGLER_SECONDS = 10.0  # what they get in all, before the group ends


class WorkerGroup:
    """`world_size` processes, each with one object, on all of which the same methods run in the same order.

    The target is built in every worker as `Class(rank, world_size, device, communicator, emit)`. It may have two
    methods of its own for objects that must stay in the worker: `replace(obj)` and `restore(handle)`, as in
    `encoder.encode` and `decoder.decode`. Calls from many threads are served in the order in which they came.

    Args:
        world_size: number of workers.
        device: `"cpu"` or `"cuda"`.
        target: `"module:Class"`, importable in a fresh interpreter with this one's `sys.path`.
        device_ids: CUDA device of each rank; by default 0, 1, 2, ….
        backend: of the collectives; `"auto"` picks by device.
        timeout: seconds that a request may take, unless the call says otherwise.
        start_timeout: seconds until every worker must be ready.
        threads: CPU threads of each worker, equal on every rank; by default the available CPUs shared out.
        replace: this process's side of `encoder.encode`.
        restore: this process's side of `decoder.decode`.
        wait: False returns at once, so that the caller can work while the workers import torch;
            `wait_until_ready` has to come before the first call.

    Raises:
        StartupError: a worker could not start; the message ends with what it wrote to standard error.
        SharedMemoryError: the system has no memory for the collectives.
        PlacementError: `world_size`, `device` or `device_ids` make no group.
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
        replace: Replace | None = None,
        restore: Restore | None = None,
        wait: bool = True,
    ) -> None:
        self.world_size = world_size
        self.device_names = startup.device_names(world_size, device, device_ids)
        startup.check_backend(backend, device, device_ids)
        self.timeout = timeout
        self.user: weakref.ref[Any] | None = None  # of those whom this group serves in turn: see `in_use`
        self._turns = Turns()
        self._patient_until = 0.0  # with workers that are still busy with a request that was interrupted; 0: none is
        self._key = secrets.token_bytes(32)
        # Kept here and not in the channels: they often lead back to this group, which could then never be dropped.
        self._replace = replace
        self._processes = Processes(startup.create_arena(world_size))
        self._lifetime = Lifetime(self._processes, self._turns, self.device_names)
        try:
            deadline = startup.launch(
                self._processes,
                target=target,
                device_names=["cpu"] * world_size if device == "cpu" else self.device_names,
                key=self._key,
                backend=backend,
                timeout=timeout,
                start_timeout=start_timeout,
                threads=threads or max(1, usable_cpus() // world_size),
            )
        except BaseException:
            self._lifetime.end_workers()
            raise
        self._exchange = Exchange(self._processes, self._key, restore)
        self._wait: Callable[[], None] | None = functools.partial(
            startup.await_ready, self._processes, deadline, start_timeout
        )
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
                self._lifetime.end_workers()
                raise
            self._wait = None

    @property
    def in_use(self) -> bool:
        """Whether it serves a model. One that was dropped needs no more."""
        return self.user is not None and self.user() is not None

    @property
    def owner(self) -> int:
        """Id of the process that started the group."""
        return self._lifetime.owner

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [worker.pid for worker in self._processes.workers]

    @property
    def alive(self) -> bool:
        """True while requests can be served."""
        return self._lifetime.alive

    def call(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        on_event: OnEvent | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run one method with the same arguments on every rank.

        Args:
            method: a public method of the target.
            *args: its arguments; anything that `encoder.encode` takes.
            timeout: seconds from now until the answer must be there, the wait for other threads' calls included.
            on_event: called in this thread with each value that rank 0 emits meanwhile. If it raises, the request is
                cancelled and the exception goes on to the caller.
            **kwargs: its keyword arguments.

        Returns:
            Rank 0's value.

        Raises:
            WorkerError: the method raised; the exception is an instance of the original type as well.
            NotPortableError: an argument cannot be sent; its place is named. Nothing was run.
            WorkerDiedError: a worker ended. The group is of no further use.
            RequestTimeoutError: the time passed. Unless it passed in the queue, the group is of no further use.
            GroupClosedError, WrongProcessError: the group was closed, or belongs to another process.
        """
        # A method without arguments is asked for by its name alone: there is nothing to take apart and rebuild.
        request = {"method": method, "args": args, "kwargs": kwargs} if args or kwargs else method
        return self._request(method, [request], 0, timeout, on_event)[0]

    def call_each(
        self,
        method: str,
        per_rank: Iterable[tuple[Any, ...]],
        timeout: float | None = None,
        on_event: OnEvent | None = None,
    ) -> list[Any]:
        """Run one method on every rank, with arguments of its own.

        Args:
            method: a public method of the target.
            per_rank: for each rank, the tuple of its arguments.
            timeout, on_event: as in `call`.

        Returns:
            Each rank's value. Raises what `call` raises.
        """
        requests = [{"method": method, "args": tuple(args), "kwargs": {}} for args in per_rank]
        if len(requests) != self.world_size:
            raise ValueError(f"{method}: arguments for {len(requests)} ranks, but the group has {self.world_size}")
        return self._request(method, requests, Flag.EACH, timeout, on_event)

    def close(self) -> None:
        """End the workers. Does nothing the second time; calls in flight raise GroupClosedError."""
        if os.getpid() != self.owner:
            return
        self._lifetime.note(deaths.closed())
        if self._turns.is_mine() and self._exchange.in_event:  # the request that is in flight ends the group
            self._processes.kill()
            return
        polite = not self._patient_until and self._turns.acquire(timeout=0.0)
        if not polite:
            self._processes.kill()
        if polite or self._turns.acquire(timeout=_GOODBYE_SECONDS):
            try:
                if polite and self._lifetime.has_workers and self._wait is None:  # while starting they would not hear
                    self._processes.dismiss(_GOODBYE_SECONDS)
                self._lifetime.end_workers()
            finally:
                self._turns.release()

    def check_process(self) -> None:
        """Raise WrongProcessError in any process but the one that started the group."""
        self._lifetime.check_process()

    def watch_descriptors(self) -> list[int]:
        """Duplicates of the workers' pidfds, readable once the worker has ended. The caller closes them."""
        return [os.dup(worker.pidfd) for worker in self._processes.workers]

    def bury(self) -> None:
        """End an idle group of which a worker has died. Where a request is running, it sees so by itself, first."""
        if not self._turns.acquire(_GOODBYE_SECONDS):
            self._processes.kill()  # its caller is busy in on_event
            return
        try:
            dead = [worker.rank for worker in self._processes.workers if worker.has_ended()]
            if dead and not self._lifetime.is_over and self._lifetime.has_workers:
                self._lifetime.end(self._lifetime.death_of(dead[0]))
        finally:
            self._turns.release()

    def settle(self, deadline: float) -> None:
        """Wait until the workers have left a request that was interrupted. If they do not, the group ends.

        Args:
            deadline: on the clock of `time.monotonic`, in seconds. After it, nothing is decided.
        """
        if self._patient_until:
            with Held():
                try:
                    mine = self._turns.acquire(deadline - time.monotonic())
                    if mine and self._patient_until and not self._lifetime.is_over:
                        self._leave_interrupted(deadline)
                finally:
                    self._turns.release()

    def _request(
        self, method: str, requests: Sequence[Any], flags: int, timeout: float | None, on_event: OnEvent | None
    ) -> list[Any]:
        self._lifetime.check_usable()
        with LetThrough():
            messages = [encode(request, self._key, self._replace) for request in requests]
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        if self._exchange.in_event and self._turns.is_mine():
            raise GroupError(f"{method!r} was called from the on_event of another request; call it when that is done")
        with Held():
            try:
                if not self._turns.acquire(limit):
                    raise RequestTimeoutError(
                        f"{method!r} did not get its turn within {limit:.3g} s; other calls keep the workers"
                    )
                self._lifetime.check_usable()
                if self._patient_until:
                    if not self._leave_interrupted(deadline):
                        raise RequestTimeoutError(
                            f"{method!r} had to wait for the workers to leave a request that was interrupted, and they"
                            f" did not within {limit:.3g} s"
                        )
                    self._lifetime.check_usable()
                return self._run(messages, flags, method, limit, deadline, on_event)
            finally:
                self._turns.release()

    def _run(
        self,
        messages: list[Encoded],
        flags: int,
        method: str,
        limit: float,
        deadline: float,
        on_event: OnEvent | None,
    ) -> list[Any]:
        try:
            return self._exchange.run(messages, flags, deadline, on_event)
        except WorkerGoneError as error:
            self._lifetime.fail(self._lifetime.death_of(error.rank))
        except RequestTimeoutError:
            self._fail_timed_out(method, limit)
        except (ChannelClosedError, ProtocolError) as error:
            self._lifetime.fail(deaths.as_before(error))
        finally:
            if self._exchange.unfinished and not self._lifetime.is_over:
                self._abandon()
            else:
                self._exchange.discard()

    def _abandon(self) -> None:
        """After Ctrl-C: have the workers leave the request. Who takes longer is waited for by the next request."""
        begun = time.monotonic()
        self._patient_until = begun + _STRAGGLER_SECONDS
        left = False
        try:
            left = self._leave_interrupted(begun + _INTERRUPT_SECONDS)
        finally:
            if not left:
                # Where no request comes, they must not be busy with this one for ever.
                watch = threading.Timer(_STRAGGLER_SECONDS, self.settle, [math.inf])
                watch.daemon = True
                watch.start()

    def _leave_interrupted(self, deadline: float) -> bool:
        """Whether the workers have left the interrupted request, or the group has ended because they had not."""
        patient_until = max(self._patient_until, time.monotonic() + _INTERRUPT_SECONDS)  # who looks late looks, too
        try:
            self._exchange.finish(min(deadline, patient_until))
        except RequestTimeoutError:
            if time.monotonic() < patient_until:
                return False
            self._lifetime.end(deaths.not_interrupted(_STRAGGLER_SECONDS))
        except WorkerGoneError as error:
            self._lifetime.end(self._lifetime.death_of(error.rank))
        except GroupError as error:
            self._lifetime.end(deaths.as_before(error))
        self._exchange.discard()
        self._patient_until = 0.0
        return True

    def _fail_timed_out(self, method: str, limit: float) -> NoReturn:
        text = f"{method!r} ran past its deadline of {limit:.3g} s; no answer from ranks {self._exchange.unanswered}"
        self._lifetime.end(deaths.overdue(text))
        raise RequestTimeoutError(f"{text}; its workers were ended. Allow more time with timeout=") from None
