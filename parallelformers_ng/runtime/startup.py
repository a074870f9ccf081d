"""Starts the ranks of a group at the same time, and waits until all ranks are ready or one rank has failed."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from parallelformers_ng.collectives.arena import MAX_WORLD_SIZE, Arena
from parallelformers_ng.collectives.connect import chosen_backend
from parallelformers_ng.collectives.process_group import create_rendezvous
from parallelformers_ng.errors import (
    ChannelClosedError,
    PlacementError,
    ProtocolError,
    RequestTimeoutError,
    SharedMemoryError,
    StartupError,
)
from parallelformers_ng.runtime import cores, failures, forks, tracebacks
from parallelformers_ng.runtime.forks import ForkServer
from parallelformers_ng.runtime.placement import NCCL_PHASE, NCCL_REMEDY
from parallelformers_ng.runtime.processes import Processes
from parallelformers_ng.runtime.records import RankRecords
from parallelformers_ng.runtime.spawn import environment_of_worker, module_path, poll_of
from parallelformers_ng.runtime.worker_process import WorkerProcess
from parallelformers_ng.wire.frame import OUT_OF_MEMORY, FileDescriptor, FrameKind, why_no_memory

_LATE_SECONDS = 1.0  # time to read messages of workers if the caller was busy until the deadline


def create_arena(world_size: int) -> Arena:
    if world_size > MAX_WORLD_SIZE:
        raise PlacementError(
            f"a model has {world_size} ranks on this machine, and the limit is {MAX_WORLD_SIZE}; lower num_gpus"
        )
    try:
        return Arena.create(world_size, cpus=cores.usable_cpus())
    except OSError as error:
        kind = SharedMemoryError if error.errno in OUT_OF_MEMORY else StartupError
        raise kind(f"the collectives of {world_size} workers cannot be set up: {why_no_memory(error)}") from error


Spans = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class StartSettings:
    """Settings of all ranks of a group.

    Attributes:
        target: `"module:Class"` of the object that each worker builds.
        threads: CPU threads of each worker; None divides the CPUs among the ranks.
    """

    target: str
    imports: str | None
    backend: str
    timeout: float
    start_timeout: float
    threads: int | None


def launch(
    processes: Processes, settings: StartSettings, device_names: list[str], among: tuple[int, int], spans: Spans = None
) -> Callable[[], None]:
    """Start one worker per device. If `launch` raises, the caller must end `processes`.

    Args:
        among: (index of this group's first rank, number of ranks), counted over all ranks that share the CPUs.
        spans: for a group over several hosts, each rank's argument `span` of `connect`, with an entry `caller`: socket
            and keys of the connection to the group's caller. None on one host.

    Returns:
        Function that waits until all workers are ready: `await_ready` with its arguments.
    """
    deadline = time.monotonic() + settings.start_timeout
    world_size = len(device_names)
    first, ranks = among
    threads = settings.threads or cores.threads_of_rank(ranks)
    cpus = cores.cpus_of_ranks(ranks, threads) if device_names[0].startswith("cpu") else None
    server, environment = forks.running(settings.imports), environment_of_worker(threads)
    ranks_before = 0 if spans is None else sum(spans[0]["counts"][: spans[0]["number"]])
    workers: list[WorkerProcess] = []
    processes.workers = workers  # set before workers start, so that earlier workers are ended if a later one fails
    workers.extend(WorkerProcess(ranks_before + index, environment, server) for index in range(world_size))
    standard_error = 2 if _has_standard_error() else os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    processes.records = RankRecords()
    common: dict[str, Any] = vars(settings) | {
        "world_size": world_size,
        "threads": threads,
        "path": module_path(),
        "environment": environment,
        "rendezvous": None,
        "arena": FileDescriptor(processes.arena.fd),
        "stderr": FileDescriptor(standard_error),
        "records": FileDescriptor(processes.records.theirs.fileno()),
    }
    # The shared-memory backend needs no rendezvous.
    if chosen_backend(settings.backend, device_names[0].partition(":")[0]) != "shared_memory":
        processes.rendezvous = create_rendezvous()
        common["rendezvous"] = FileDescriptor(processes.rendezvous)
    spare_cpus = cores.usable_cpus() - 1  # the caller needs one CPU
    if cpus is not None:
        processes.quiet_cpus = os.sched_getaffinity(0).difference(*cpus[:spare_cpus])
    for rank, worker in enumerate(workers):
        try:
            rank_settings = {
                "rank": rank,
                "device": device_names[rank],
                "spins": first + rank < spare_cpus,
                "cpus": None if cpus is None else sorted(cpus[first + rank]),
                "span": None if spans is None else spans[rank],
            }
            worker.channel.send(FrameKind.REQUEST, 0, common | rank_settings, deadline)
        except ChannelClosedError:
            _fail_ended(worker)
    if standard_error != 2:
        os.close(standard_error)
    processes.records.theirs.close()
    return functools.partial(await_ready, workers, server, deadline, settings.start_timeout)


def _has_standard_error() -> bool:
    return sys.__stderr__ is not None and os.path.exists("/proc/self/fd/2")


def await_ready(workers: Sequence[WorkerProcess], server: ForkServer | None, deadline: float, timeout: float) -> None:
    """Wait until all workers are ready. If `await_ready` raises, the caller must end the processes.

    After success, the start logs of the workers are written to this process's standard error; equal logs only once.

    Args:
        deadline: latest time at which all workers must be ready, in seconds of `time.monotonic`. `await_ready` waits at
            least 1 s, also after the deadline, so that a late caller can read the workers' messages.
    """
    deadline = max(deadline, time.monotonic() + _LATE_SECONDS)
    waiting: dict[int, WorkerProcess] = {}
    for worker in workers:
        try:
            worker.await_start(deadline)
        except RequestTimeoutError:
            raise _too_late(worker, timeout) from None
        waiting[worker.channel.fileno()] = worker
    while waiting:
        remaining_seconds = deadline - time.monotonic()
        ahead = [fd for fd, worker in waiting.items() if worker.channel.has_more]
        ready = ahead or [fd for fd, _ in poll_of(waiting).poll(max(remaining_seconds, 0.0) * 1000)]
        if not ready and remaining_seconds <= 0:
            raise _too_late(next(iter(waiting.values())), timeout)
        for fd in ready:
            worker = waiting[fd]
            try:
                kind, _, value = worker.channel.recv(deadline)
            except (ChannelClosedError, ProtocolError, RequestTimeoutError):
                # The socket closes when the worker ends, so there is no need to watch its pidfd.
                _fail_ended(worker)
            if kind is FrameKind.READY:
                del waiting[fd]
            elif kind is FrameKind.EVENT:
                worker.phase = str(value)
            else:
                text = f"rank {worker.rank} raised while {worker.phase}: {value.qualname}: {value.message}"
                raise StartupError(f"{text}{_tail(worker)}") from failures.rebuild(worker.rank, value)
    _pass_on_logs(workers, server)


def _too_late(worker: WorkerProcess, start_timeout: float) -> StartupError:
    remedy = NCCL_REMEDY if worker.phase == NCCL_PHASE else ""
    return StartupError(
        f"rank {worker.rank} was not ready within {start_timeout:g} s; it was {worker.phase}{_place(worker)}.{remedy}"
        f" Allow more time with start_timeout=; the load of this machine is {os.getloadavg()[0]:.1f} on"
        f" {cores.usable_cpus():g} CPUs{_tail(worker)}"
    )


def _place(worker: WorkerProcess) -> str:
    """Return the code location of a worker that is late, in parentheses; "" if the worker does not answer."""
    frames = tracebacks.collect([worker])[0]
    return f" ({frames[0].file}, line {frames[0].line})" if frames else ""


def _fail_ended(worker: WorkerProcess) -> NoReturn:
    manner = worker.manner_of_end(worker.exit_status())
    raise StartupError(f"rank {worker.rank} ended while {worker.phase}: {manner}{_tail(worker)}")


def _tail(worker: WorkerProcess) -> str:
    log = worker.startup_log().strip()
    return f"\nEnd of its standard error:\n{log}" if log else ""


def _pass_on_logs(workers: Sequence[WorkerProcess], server: ForkServer | None) -> None:
    """Write the start logs of the workers and of their fork server to standard error, equal logs only once."""
    logs = [worker.startup_log() for worker in workers]
    if server is not None and server.exit_code() is None:
        logs.insert(0, server.new_log())
    if _has_standard_error():
        for log in filter(None, dict.fromkeys(logs)):
            os.write(2, log.encode())
