"""Tests the shared memory of collectives and its errors for wrong use, in one process."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import closing

import pytest
import torch

from parallelformers_ng.collectives.arena import Arena, available_memory
from parallelformers_ng.collectives.communicator import SingleCommunicator, sum_in_rank_order
from parallelformers_ng.collectives.connect import connect
from parallelformers_ng.collectives.shared_memory import SharedMemoryCommunicator, is_built
from tests.helpers.rank_group import SLOT_BYTES


def test_arena_refuses_more_than_the_available_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory() > 2**20
    # Pretend that memory is short: a real request for too much would start the out-of-memory killer.
    monkeypatch.setattr("parallelformers_ng.collectives.arena.available_memory", lambda: 2**20)
    with pytest.raises(OSError, match="exceed the available memory of 1048576 bytes") as caught:
        Arena.create(2, slot_bytes=2**19)
    assert caught.value.errno == errno.ENOSPC


def test_arena_checks_ranks_and_seals_its_file() -> None:
    for world_size in (0, 257):
        with pytest.raises(ValueError, match="Arena"):
            Arena.create(world_size)
    with closing(Arena.create(2, SLOT_BYTES)) as arena:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(arena.fd, 0)
        assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC


@pytest.mark.skipif(not is_built(), reason="the C kernel is not built")
def test_c_kernel_validates_its_arguments() -> None:
    from parallelformers_ng.collectives._kernel import Kernel

    with closing(Arena.create(2, SLOT_BYTES)) as arena:
        memory = Arena(arena.fd, 2).memory
        for bad in ((memory, 2, 2, 1.0), (memory, -1, 2, 1.0), (memory, 0, 3, 1.0), (memory, 0, 2, 0.0)):
            with pytest.raises(ValueError, match="do not fit"):
                Kernel(*bad)
        for buffer in (bytearray(100), bytearray(memory[:9000]), bytearray(20000)):
            with pytest.raises(ValueError, match="do not fit"):
                Kernel(buffer, 0, 2, 1.0)
        kernel = Kernel(memory, 0, 2, 1.0)
        for method, bad in (
            (kernel.all_reduce, (0, 1, 4)),
            (kernel.all_reduce, (0, 2**62, 0)),
            (kernel.all_reduce, (0, 1)),
            (kernel.all_gather, (0, 0, 1, 4, 1)),
            (kernel.all_gather, (0, 0, 2, 2**62, 1, 1)),
            (kernel.all_gather, (0, 0, 1, 1, -1, 1)),
        ):
            with pytest.raises((ValueError, TypeError, OverflowError)):
                method(*bad)
        kernel.close()
        with pytest.raises(ValueError, match="close"):
            kernel.all_reduce(0, 0, 0)


def test_tensors_on_other_devices_are_refused() -> None:
    with closing(Arena.create(2, SLOT_BYTES)) as arena:
        communicator = SharedMemoryCommunicator(Arena(arena.fd, 2), 0, 1.0)
        with pytest.raises(ValueError, match="meta"):
            communicator.all_reduce(torch.zeros(3, device="meta"))
        communicator.close()
        communicator.close()


def test_single_rank_computes_without_exchange() -> None:
    with closing(Arena.create(1, SLOT_BYTES)) as arena:
        communicator = connect(
            "auto", rank=0, world_size=1, device=torch.device("cpu"), arena_fd=arena.fd, rendezvous=None, timeout=1.0
        )
        assert isinstance(communicator, SingleCommunicator)
        tensor = torch.randn(3, 4)
        assert communicator.all_reduce(tensor) is tensor
        assert torch.equal(communicator.all_gather(tensor.t(), 0, [4]), tensor.t())
        arena.request_cancel(5)
        assert communicator.cancel_sequence() == 5


def test_16_bit_sums_round_once() -> None:
    parts = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    assert sum_in_rank_order(parts, out=torch.empty(1, dtype=torch.bfloat16)).item() == 258.0
