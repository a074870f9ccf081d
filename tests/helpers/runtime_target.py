"""Provides the target that workers run in the tests of the runtime."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Reading:
    name: str
    values: torch.Tensor


class Target:
    def __init__(self, rank: int, world_size: int, device: torch.device, communicator: Any, emit: Any) -> None:
        self.rank = rank
        self.communicator = communicator
        self.emit = emit
        self.world_size = world_size
        self.resets = 0
        self._reset, communicator.reset = communicator.reset, self._counted_reset

    def echo(self, value: Any = None, **more: Any) -> Any:
        return (value, more) if more else value

    def sum_of_ranks(self, value: float) -> float:
        return self.communicator.all_reduce(torch.full((8,), value + self.rank))[0].item()

    def own(self, value: Any) -> tuple[int, Any]:
        return self.rank, value

    def scale_in_place(self, tensor: torch.Tensor) -> float:
        tensor.mul_(self.rank + 2)
        self.meet()
        return tensor.sum().item()

    def zeros(self, count: int) -> torch.Tensor:
        return torch.zeros(count)

    def raise_value_error(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            raise ValueError("a bad value", 7)
        self.meet()

    def raise_odd(self) -> None:
        class Local(Exception):
            pass

        raise Local("odd")

    def raise_unicode(self) -> None:
        b"\xff".decode("ascii")

    def sleep(self, seconds: float, ranks: list[int] | None = None) -> str:
        if ranks is None or self.rank in ranks:
            time.sleep(seconds)
        return "slept"

    def wait_for_cancel(self) -> str:
        while self.communicator.cancel_sequence() != self.emit.sequence:
            time.sleep(0.002)
        return "cancelled"

    def meet(self) -> None:
        """Wait until all ranks have arrived."""
        self.communicator.all_reduce(torch.zeros(1))

    def late_to_meet(self, rank: int) -> None:
        if self.rank == rank:
            time.sleep(60)
        self.meet()

    def spin(self) -> None:
        while True:
            pass

    def exit(self, rank: int, code: int) -> None:
        if self.rank == rank:
            os._exit(code)
        self.meet()

    def crash(self, rank: int) -> None:
        """Crash this rank in native code, by writing to address 0."""
        if self.rank == rank:
            ctypes.memset(0, 1, 1)
        self.meet()

    def touch_lost_memory(self, rank: int) -> None:
        """Read beyond the end of a mapped file that has been cut short: SIGBUS."""
        if self.rank == rank:
            fd = os.memfd_create("short")
            os.ftruncate(fd, mmap.PAGESIZE)
            memory = mmap.mmap(fd, mmap.PAGESIZE)
            os.ftruncate(fd, 0)
            memory[0] = 1
        self.meet()

    def connect_to_nobody(self) -> None:
        """Make torch's native code log errors, as it also does after the death of a rank of NCCL."""
        with contextlib.suppress(dist.DistNetworkError):
            dist.TCPStore("127.0.0.1", 1, is_master=False, timeout=timedelta(seconds=0.2))

    def leave(self, code: int) -> None:
        sys.exit(code)

    def count(self, limit: int) -> int:
        for number in range(limit):
            if self.communicator.cancel_sequence() == self.emit.sequence:
                return number
            self.emit(number)
            time.sleep(0.001)
        return limit

    def _counted_reset(self) -> None:
        self.resets += 1
        self._reset()

    def reset_count(self) -> int:
        return self.resets

    def _private(self) -> str:
        return "private"

    def call_it(self, function: Any) -> Any:
        return function(self.rank)

    def threads(self) -> tuple[int, str]:
        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]

    def write_to_parent(self, data: bytes) -> None:
        if self.rank == 0:
            os.write(int(sys.argv[1]), data)
        time.sleep(60)

    def read_and_close(self, file: Any) -> bytes:
        content = os.pread(file.fd, 100, 0)
        file.close()
        return content

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
            print(text, file=sys.stderr, flush=True)

    def write_log(self, logger: str, level: int, text: str) -> None:
        logging.getLogger(logger).log(level, text, self.rank)


class FailsToBuild:
    def __init__(self, rank: int, *_: Any) -> None:
        print(f"rank {rank} says why on standard error", file=sys.stderr)
        if rank == 1:
            raise LookupError("no weights in the attic")
        time.sleep(60)


class DiesWhileBuilding:
    def __init__(self, rank: int, *_: Any) -> None:
        if rank == 1:
            print("last words", file=sys.stderr)
            os._exit(7)
        time.sleep(60)


class NeverReady:
    def __init__(self, rank: int, *_: Any) -> None:
        if rank == 1:
            time.sleep(600)
