"""Pretends the memory that devices of several processes share, and torch's one-shot sum in it.

The rules follow torch's `CUDASymmetricMemory.cu`, `CUDASymmetricMemoryOps.cu`, `CUDASymmetricMemory-inl.cuh` and
`CUDASymmetricMemoryUtils.cpp` in `torch/csrc/distributed/c10d/symm_mem/`. Anonymous files replace the devices' memory:
a rank maps the files of its peers, and the mapping outlives the peer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import mmap
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _resolve_process_group

from tests.pretend_cuda import graphs
from tests.pretend_cuda.memory import key_of, memory
from tests.pretend_cuda.streams import order
from tests.pretend_cuda.tensor import DeviceTensor

MISHAP = "PRETENDED_SMALL_SUMS"
"""Environment variable: "far" if no device can read another, "raise" if rank 1 cannot share memory, "wrong" if sums are
wrong on rank 1, "hang" if rank 1 never signals."""
SIGNAL_BYTES = 2048  # default_signal_pad_size
sums = 0
"""Number of sums that this process has computed, replays included."""

lines: list[str] = []
"""Lines that the choice of sums wrote to the log."""

_exchanges = itertools.count()  # StoreExchange::seq_id_
_blocks: dict[int, _Block] = {}  # address of the buffer → block


class _Block:
    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.file = os.memfd_create("pretended device memory", os.MFD_CLOEXEC)
        os.ftruncate(self.file, SIGNAL_BYTES + size)
        self.signals, self.buffer = _mapped(self.file, size)
        self.handles: dict[str, SymmetricMemory] = {}


def _mapped(file: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    memory = mmap.mmap(file, SIGNAL_BYTES + size)
    signals = torch.frombuffer(memory, dtype=torch.int32, count=SIGNAL_BYTES // 4)
    return signals, torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=SIGNAL_BYTES)


class SymmetricMemory:
    """A stand-in for `torch._C._distributed_c10d._SymmetricMemory`: the memory of all ranks, as this rank sees it."""

    def __init__(self, block: _Block, rank: int, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.rank, self.parts = rank, parts
        self._device = block.device

    @staticmethod
    def empty_strided_p2p(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        graphs.refuse()
        block = _Block(math.prod(size) * dtype.itemsize, device)
        memory.uncounted.add(key_of(block.buffer))
        _blocks[block.buffer.data_ptr()] = block
        return DeviceTensor(block.buffer.view(dtype).as_strided(size, stride), device)

    @staticmethod
    def rendezvous(tensor: torch.Tensor, group_name: str) -> SymmetricMemory | None:
        assert isinstance(tensor, DeviceTensor)
        return _rendezvous(tensor.host, group_name)

    def get_signal_pad(self, rank: int, sizes: Any, dtype: torch.dtype) -> torch.Tensor:
        assert math.prod(sizes) * dtype.itemsize <= SIGNAL_BYTES
        assert dtype is torch.int32
        signals = self.parts[rank][0]
        memory.uncounted.add(key_of(signals))
        order.written_long_ago(key_of(signals))  # `alloc` writes the signals and waits
        return DeviceTensor(signals[: math.prod(sizes)].view(sizes), self._device)


def _rendezvous(host: torch.Tensor, group_name: str) -> SymmetricMemory | None:
    block = _blocks.get(host.untyped_storage().data_ptr())
    if block is None:
        return None
    group = _resolve_process_group(group_name)  # RuntimeError if the name is unknown
    if group_name in block.handles:
        return block.handles[group_name]
    graphs.refuse()
    rank, size, store = group.rank(), group.size(), group.get_group_store()
    name = Path(tempfile.gettempdir(), f"symm_mem-{os.getpid()}")
    if len(str(name)) > 107:
        os.abort()  # the path is copied beyond the end of sun_path
    with contextlib.ExitStack() as stack:  # IpcChannel
        channel = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        channel.bind(str(name))
        stack.callback(name.unlink)
        if os.environ.get(MISHAP) == "raise" and rank == 1:
            raise RuntimeError("CUDA driver error: operation not supported")
        file = f"/proc/{os.getpid()}/fd/{block.file}"
        requests = _all_gather(store, rank, size, [block.device.index, block.size, file])
        may_overlap = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"
        if len({device for device, _, _ in requests}) < size and not may_overlap:
            raise RuntimeError(
                "CUDASymmetricMemoryAllocator::rendezvous: detected allocations from overlapping devices"
            )
        if len({count for _, count, _ in requests}) > 1:
            raise RuntimeError("Expected reqs[r].buffer_size == reqs[0].buffer_size to be true, but got false.")
        parts = []
        for other, (_, count, path) in enumerate(requests):
            with open(path, "r+b") as opened:
                own = (block.signals, block.buffer)
                parts.append(own if other == rank else _mapped(opened.fileno(), count))
        _all_gather(store, rank, size, None)
    block.handles[group_name] = SymmetricMemory(block, rank, parts)
    return block.handles[group_name]


def _all_gather(store: Any, rank: int, size: int, value: Any) -> list[Any]:
    """Exchange values as `StoreExchange` does: keys have the number of the exchange in this process."""
    number = next(_exchanges)
    store.set(f"CUDASymmetricMemory/{number}/{rank}", json.dumps(value))
    keys = [f"CUDASymmetricMemory/{number}/{other}" for other in range(size)]
    store.wait(keys)  # until the store's time limit
    return [json.loads(store.get(key)) for key in keys]


def one_shot_all_reduce_out(input: torch.Tensor, reduce_op: str, group_name: str, out: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks' buffers, like torch's operator; a capture computes nothing."""
    global sums
    assert input.is_contiguous()
    assert out.is_contiguous()
    assert (out.shape, reduce_op) == (input.shape, "sum")
    if input.numel() == 0:
        return out
    shared = _rendezvous(input, group_name)
    if shared is None:
        raise RuntimeError("one_shot_all_reduce: input must be allocated with empty_strided_p2p().")
    size = input.element_size()
    alignment = min(_alignment(input.storage_offset() * size), _alignment(input.nbytes))
    if alignment < max(4, size):
        raise RuntimeError(f"one_shot_all_reduce<{input.dtype}>: input must be at least {max(4, size)}-byte aligned.")
    if input.dtype not in (torch.bfloat16, torch.float32):
        raise NotImplementedError(f'"one_shot_all_reduce" not implemented for {input.dtype}')
    if out.dtype is not input.dtype:
        raise RuntimeError(f"expected scalar type {input.dtype} but found {out.dtype}")
    if out.data_ptr() % alignment:  # torch checks only the input
        raise torch.AcceleratorError("CUDA error: misaligned address")
    if graphs.capturing is not None:
        return out
    sums += 1
    blocks = min(math.ceil(input.numel() / (512 * alignment // size)), 24)
    _signal(shared, blocks)
    first = input.storage_offset() * size
    parts = [buffer[first : first + input.nbytes].view(input.dtype) for _, buffer in shared.parts]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part  # 16-bit floats in 16 bits
    _signal(shared, blocks)
    out.copy_(total.view_as(out))
    if os.environ.get(MISHAP) == "wrong" and shared.rank == 1:
        out.mul_(0.5)
    return out


def _alignment(value: int) -> int:
    return next(width for width in (16, 8, 4, 2, 1) if value % width == 0)


def _signal(shared: SymmetricMemory, blocks: int) -> None:
    """Exchange signals with all ranks, like `sync_remote_blocks`: without a time limit, and whatever has been
    aborted."""
    count = len(shared.parts)
    pads = [signals[: blocks * count].view(blocks, count) for signals, _ in shared.parts]
    for target, pad in enumerate(pads):
        untaken = pad[:, shared.rank]
        _wait(untaken, 0)
        if os.environ.get(MISHAP) != "hang" or shared.rank != 1 or target == 1:
            untaken.fill_(1)
    for source in range(count):
        awaited = pads[shared.rank][:, source]
        _wait(awaited, 1)
        awaited.fill_(0)


def _wait(signals: torch.Tensor, value: int) -> None:
    begun = time.monotonic()
    while not bool((signals == value).all()):
        time.sleep(0.0 if time.monotonic() - begun < 0.002 else 0.0005)


def live() -> int:
    """Return the number of buffers that were not freed."""
    return len(_blocks)


def _free(key: int) -> None:
    for address, block in [*_blocks.items()]:
        if key_of(block.buffer) == key:
            os.close(_blocks.pop(address).file)


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.module == "small_sums":
            lines.append(record.getMessage())


def install() -> None:
    """Replace torch's names, until this process ends."""
    from parallelformers_ng.collectives import small_sums

    small_sums._SymmetricMemory = SymmetricMemory  # type: ignore[assignment, misc]
    small_sums.TRIAL_SECONDS = 2.0
    memory.on_free.append(_free)
    small_sums.log.addHandler(_Notes())
    small_sums.log.setLevel(logging.INFO)
    _library.impl("one_shot_all_reduce_out", one_shot_all_reduce_out, "CPU")


_library = torch.library.Library("symm_mem", "IMPL")
