"""Starts processes that call collectives on one arena, and computes the expected results."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from parallelformers_ng.collectives.arena import Arena
from parallelformers_ng.collectives.communicator import Communicator
from parallelformers_ng.collectives.connect import connect
from parallelformers_ng.collectives.process_group import create_rendezvous, rendezvous_path
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator

SLOT_BYTES, ONE_SHOT_BYTES = 4096, 1024
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64)

PRELOAD = [
    "pytest",
    "parallelformers_ng.collectives.connect",
    "parallelformers_ng.sharding.linear",
    "tests.helpers.patience",
]
"""Imports of the functions that ranks run, made once: otherwise each rank would spend seconds on them."""


def _serve(rank: int, world_size: int, arena: DupFd, pipe: Any) -> None:
    """Run a rank: receive a function, call it with a communicator, send the result."""
    torch.set_num_threads(1)
    fd = arena.detach()

    def connect(timeout: float = 20.0) -> SharedMemoryCommunicator:
        return SharedMemoryCommunicator(Arena(fd, world_size), rank, timeout)

    usual = connect()
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, timeout = pipe.recv()
            communicator = usual if timeout is None else connect(timeout)
            try:
                pipe.send((function(communicator, *arguments), None))
            except BaseException:  # pytest's own failures do not derive from Exception
                pipe.send((None, traceback.format_exc()))


class RankGroup:
    """Ranks that run for a whole test module on one arena. Their only state is the arena's counters."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.world_size = world_size
        self.arena = Arena.create(world_size, SLOT_BYTES, ONE_SHOT_BYTES)
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            arguments = (rank, world_size, DupFd(self.arena.fd), theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def start(self, function: Callable, *arguments: Any, timeout: float | None = None) -> None:
        for pipe in self.pipes:
            pipe.send((function, arguments, timeout))

    def finish(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(60), f"rank {rank} hangs"
            answers.append(pipe.recv())
        for rank, (_, error) in enumerate(answers):
            assert error is None, f"rank {rank}: {error}"
        return [value for value, _ in answers]

    def run(self, function: Callable, *arguments: Any, timeout: float | None = None) -> list[Any]:
        self.start(function, *arguments, timeout=timeout)
        return self.finish()

    def run_with_gloo(self, function: Callable) -> None:
        """Call a function on all ranks, with the communicator and the other arguments of `connect_gloo`."""
        rendezvous, arena = create_rendezvous(), Arena.create(self.world_size)
        try:
            self.run(function, rendezvous_path(rendezvous), f"/proc/{os.getpid()}/fd/{arena.fd}")
        finally:
            os.close(rendezvous)
            arena.close()

    def reset(self) -> None:
        self.arena.reset()
        self.run(_reset)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(10)
            assert process.exitcode == 0
        self.arena.close()


def _reset(communicator: Communicator) -> None:
    communicator.reset()


def connect_gloo(communicator: Communicator, rendezvous: str, arena: str) -> Communicator:
    """Connect all ranks of the arena by gloo. Runs in each rank; see `RankGroup.run_with_gloo`."""
    rank, world_size = communicator.rank, communicator.world_size
    arena_fd = os.open(arena, os.O_RDWR)
    common: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": 20.0, "rendezvous": rendezvous}
    gloo = connect("gloo", device=torch.device("cpu"), arena_fd=arena_fd, **common)
    os.close(arena_fd)
    return gloo


def reset_gloo(communicator: Communicator, gloo: Any) -> None:
    """Reset arena and gloo after an abort, in each rank, as the parent and the ranks do."""
    meet(communicator)
    gloo._arena.reset()  # the parent's part
    meet(communicator)
    gloo.reset()


def meet(communicator: Communicator) -> None:
    """Wait until all ranks have arrived."""
    communicator.all_reduce(torch.zeros(1))


def values(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point or dtype.is_complex:
        scale = torch.randint(-8, 8, (count,), generator=generator).exp2()
        return (torch.randn(count, generator=generator) * scale).to(dtype)
    return torch.randint(0, 120, (count,), generator=generator).to(dtype)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def expected_sum(world_size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values(0, count, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + values(rank, count, dtype).to(wide)
    return total.to(dtype)
